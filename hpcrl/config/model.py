"""The sections `model` and `reference`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from hpcrl.models.families import family_of
from hpcrl.models.mtp import MTP
from hpcrl.spec.fields import NUMBER, Positive, PositiveFloat, Section, Seed

MIN_VOCABULARY = 259
"""Tokens of the tokenizer created for model.tiny: every byte and three special tokens."""


class TinyModel(Section):
    """A model created from these sizes with seeded random weights, used if model.path is not given (demos, tests)."""

    architecture: Literal["qwen2", "qwen3", "qwen3_moe", "llama", "gemma2", "qwen2_5_vl"] = "qwen2"
    """Model family. qwen2_5_vl takes images; its tower has as many layers and heads, and the widths, of the decoder."""
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
    """Key and value heads; must divide num_heads."""
    intermediate_size: Annotated[int, Field(ge=1, le=1 << 20), NUMBER] = 192
    """Width of the feed-forward layer."""
    num_experts: Annotated[int, Field(ge=1, le=1 << 12), NUMBER] = 4
    """Experts per layer (qwen3_moe)."""
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
        """The config.json of the model, which hpcrl.engines.tiny creates."""
        if self.takes_images:
            text = self.model_copy(update={"architecture": "qwen2"}).hf_config()
            return {"model_type": self.architecture, "text_config": text, "vision_config": self.tower_config()}
        return {
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.hidden_size // self.num_heads,
            "tie_word_embeddings": self.tie_word_embeddings,
            "num_experts": self.num_experts,
            "num_experts_per_tok": min(2, self.num_experts),
            "moe_intermediate_size": self.intermediate_size,
        }


def _trained_mtp(value: object) -> object:
    if value == "train":
        text = "expected 'keep' or 'drop': no engine trains MTP layers, which transformers' models do not have"
        raise PydanticCustomError("not_trained", "{text}", {"text": text})
    return value


class ModelConfig(Section):
    """The policy. `path` is a folder in HF layout; without a path, model.tiny is created inside the run folder."""

    path: str | None = None
    """Folder in HF layout (config.json, *.safetensors, tokenizer.json); null: create model.tiny."""
    tiny: TinyModel = TinyModel()
    """The model to create if no path is given."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trainer's master weights with fsdp2, and of exported weights; megatron and deepspeed have fp32 master
    weights."""
    mtp: Annotated[MTP, BeforeValidator(_trained_mtp)] = "keep"
    """Multi-token prediction layers (MTP) of the folder, which speculative decoding uses and no engine trains: `keep`
    copies their tensors unchanged to exports; `drop` leaves them out, and sets their number in config.json to 0."""


class ReferenceConfig(Section):
    """The frozen model of the role reference, for KL terms and pipelines that ask for it. Its engine reads the keys of
    `trainer`, and model.dtype."""

    path: str | None = None
    """Folder in HF layout, with a tokenizer in which every token of the policy has the same id; null: the policy's
    initial model (model)."""
