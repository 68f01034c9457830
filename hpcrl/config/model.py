"""The sections `model` and `reference`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hpcrl.models.families import family_of
from hpcrl.models.mtp import ModelMTP
from hpcrl.spec.fields import NUMBER, NonEmpty, Positive, PositiveFloat, Section, Seed

MIN_VOCABULARY = 259
"""Tokens of the tokenizer created for model.tiny: every byte and three special tokens."""
TINY_WINDOW = 16
"""Tokens to which a token attends in layers of model.tiny with windows."""


class TinyModel(Section):
    """A model created from these sizes with seeded random weights, used if model.path is not given (demos, tests)."""

    architecture: Literal[
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "llama",
        "gemma2",
        "gemma3_text",
        "gpt_oss",
        "deepseek_v3",
        "qwen2_5_vl",
    ] = "qwen2"
    """Model family. qwen2_5_vl takes images; its tower has as many layers and heads, and the widths, of the decoder.
    Each second layer of gemma3_text and gpt_oss has a window of 16 tokens, of qwen3_next attention; its other layers
    have a gated delta rule with as many heads, and all have a shared expert. deepseek_v3 has a first layer without
    experts, a shared expert, and latents of half (queries) and a quarter (keys and values) of hidden_size."""
    vocab_size: Annotated[int, Field(ge=MIN_VOCABULARY, le=1 << 20), NUMBER] = 320
    """Rows of the embedding; the tokenizer is trained to at most this many tokens."""
    corpus: list[str] = []
    """Texts of the task, whose words become tokens before other words, up to vocab_size."""
    hidden_size: Annotated[int, Field(ge=1, le=1 << 16), NUMBER] = 64
    """Width of the hidden states."""
    num_layers: Annotated[int, Field(ge=1, le=1000), NUMBER] = 2
    """Decoder layers."""
    num_heads: Positive = 4
    """Query heads."""
    num_kv_heads: Positive = 2
    """Key and value heads; must divide num_heads. The heads of deepseek_v3 share latents instead."""
    intermediate_size: Annotated[int, Field(ge=1, le=1 << 20), NUMBER] = 192
    """Width of the feed-forward layer."""
    num_experts: Annotated[int, Field(ge=1, le=1 << 12), NUMBER] = 4
    """Experts per layer (qwen3_moe, qwen3_next, gpt_oss, deepseek_v3), each of width intermediate_size; a token uses
    two."""
    max_position_embeddings: Positive = 4096
    """Maximum sequence length, tokens."""
    tie_word_embeddings: bool = True
    """Use the embedding as the output projection."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the weights. A larger one, such as 0.1, helps a small model to learn attention to earlier
    tokens sooner."""
    seed: Seed = 0
    """Seed of the weights."""

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images."""
        return family_of(self.architecture).vision is not None

    @property
    def least(self) -> dict[str, int]:
        """The least values of keys: routers of deepseek_v3 rank groups by two experts, and the first layer of
        qwen3_next with attention is the second."""
        match self.architecture:
            case "deepseek_v3":
                return {"num_experts": 2}
            case "qwen3_next":
                return {"num_layers": 2}
            case _:
                return {}

    def tower_config(self) -> dict[str, Any]:
        """vision_config of a model that takes images."""
        return {
            "depth": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "intermediate_size": self.intermediate_size,
            "out_hidden_size": self.hidden_size,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [self.num_layers - 1],
            "initializer_range": self.initializer_range,
        }

    def hf_config(self) -> dict[str, Any]:
        """The config.json of the model, which hpcrl.engines.tiny creates, without token ids."""
        if not self.takes_images:
            return {"model_type": self.architecture, **self._decoder_config()}
        pairs = self.hidden_size // self.num_heads // 2
        sections = [pairs - 2 * (3 * pairs // 8), 3 * pairs // 8, 3 * pairs // 8]
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
        return {
            "model_type": self.architecture,
            "text_config": self._decoder_config() | {"rope_parameters": rope},
            "vision_config": self.tower_config(),
            "tie_word_embeddings": self.tie_word_embeddings,
        }

    def _decoder_config(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            **self._own_keys(self.hidden_size // self.num_heads),
        }

    def _own_keys(self, head_dim: int) -> dict[str, Any]:
        """The keys that not every architecture has."""
        chosen, width = {"num_experts_per_tok": min(2, self.num_experts)}, {"head_dim": head_dim}
        windows = {
            "sliding_window": TINY_WINDOW,
            "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(self.num_layers)],
        }
        experts = {"num_experts": self.num_experts, "moe_intermediate_size": self.intermediate_size}
        match self.architecture:
            case "qwen3":
                return width
            case "qwen3_moe":
                return chosen | experts | {"norm_topk_prob": True}
            case "qwen3_next":
                mixers = [("linear_attention", "full_attention")[i % 2] for i in range(self.num_layers)]
                heads = {"linear_num_key_heads": self.num_kv_heads, "linear_num_value_heads": self.num_heads}
                sizes = {"linear_key_head_dim": head_dim, "linear_value_head_dim": head_dim}
                shared = {"shared_expert_intermediate_size": self.intermediate_size}
                return width | chosen | experts | shared | heads | sizes | {"layer_types": mixers}
            case "gemma2":
                return width | {"query_pre_attn_scalar": head_dim}
            case "gemma3_text":
                return width | windows | {"query_pre_attn_scalar": head_dim}
            case "gpt_oss":
                return width | windows | chosen | {"num_local_experts": self.num_experts}
            case "deepseek_v3":
                return chosen | {
                    "num_key_value_heads": self.num_heads,
                    "q_lora_rank": max(1, self.hidden_size // 2),
                    "kv_lora_rank": max(1, self.hidden_size // 4),
                    "qk_nope_head_dim": head_dim,
                    "qk_rope_head_dim": head_dim,
                    "v_head_dim": head_dim,
                    "first_k_dense_replace": 1,
                    "n_routed_experts": self.num_experts,
                    "n_shared_experts": 1,
                    "n_group": 1,
                    "topk_group": 1,
                    "moe_intermediate_size": self.intermediate_size,
                    "num_nextn_predict_layers": 0,
                }
            case _:
                return {}


class ModelConfig(Section):
    """The policy. `path` is a folder in HF layout; without a path, model.tiny is created inside the run folder."""

    path: NonEmpty | None = None
    """Folder in HF layout (config.json, *.safetensors, tokenizer.json); null: create model.tiny."""
    tiny: TinyModel = TinyModel()
    """The model to create if no path is given."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trainer's master weights with fsdp2, and of exported weights; megatron and deepspeed have fp32 master
    weights."""
    mtp: ModelMTP = "keep"
    """Multi-token prediction layers (MTP) of the folder, which speculative decoding uses: `keep` copies their tensors
    unchanged to exports; `drop` leaves them out, and sets their number in config.json to 0; `train` trains them
    beside the policy (fsdp2, trainer.fsdp2.mtp_loss) and exports them."""


class ReferenceConfig(Section):
    """The frozen model of the role reference, for KL terms and pipelines that ask for it. Its engine reads the keys of
    `trainer`, and model.dtype."""

    path: NonEmpty | None = None
    """Folder in HF layout, with a tokenizer in which every token of the policy has the same id; null: the policy's
    initial model (model)."""
    cache: NonEmpty | None = None
    """Folder, on a file system of all nodes, for the reference's log-probs of all rows of a pipeline that learns from
    answers. They are computed once, before the first step, and read by later runs of the same model and rows; null:
    computed in every step."""
