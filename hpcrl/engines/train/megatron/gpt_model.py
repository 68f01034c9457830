"""Megatron-Core's GPTModel for an HF folder's config.json, with Transformer Engine's layers on CUDA and otherwise with
Megatron's own layers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hpcrl.engines.train.fsdp2.logits import Head
from hpcrl.engines.train.fsdp2.taught import Taught
from hpcrl.engines.train.fsdp2.teacher_top_k import teacher_top_k
from hpcrl.engines.train.fsdp2.token_divergence import token_divergence
from hpcrl.engines.train.fsdp2.vocabulary import VocabularyPart
from hpcrl.engines.train.megatron.choices import choose_groups, router_options
from hpcrl.engines.train.megatron.delta_mixer import DeltaMixer
from hpcrl.engines.train.megatron.latent import latent_options
from hpcrl.engines.train.megatron.local_layers import BiasedRowParallelLinear, PackedAttention, RMSNorm
from hpcrl.engines.train.megatron.logprobs import vocabulary_logprobs
from hpcrl.engines.train.megatron.parallel import padded_vocabulary, split_layers
from hpcrl.engines.train.megatron.spec import COUNTED, ENDS, SPEC, MegatronConfig
from hpcrl.engines.train.megatron.unsupported import lacking
from hpcrl.models.delta import DeltaSizes, delta_layers, delta_sizes
from hpcrl.models.families import family_of, read_shape, with_decoder
from hpcrl.models.router import ExpertRouter
from hpcrl.models.shape import CannotPlanError, ModelShape
from hpcrl.models.windows import SLIDING
from hpcrl.system.clock import UNCOUNTED

LATENT_EPS = 1e-6
"""Epsilon of the latent norms, whatever rms_norm_eps says, as in transformers' DeepseekV3Attention."""

ACTIVATIONS = {"silu": F.silu, "quick_gelu": quick_gelu}

_INITIALIZED: list[Any] = []
"""The default group and the sizes for which this process has created Megatron's process groups."""


@dataclass(frozen=True)
class Description:
    """A model as its config.json describes it.

    Attributes:
        json: Content of config.json.
        shape: The model's sizes.
        eps: Epsilon of the norms.
        frequencies: Frequencies of the rotary embedding.
        scale: Factor of attention scores; None stands for the default.
        window: Number of tokens to which a token attends; None if it attends to all.
        windowed: Whether each layer has the window.
        router: How routers choose; None without experts.
        options: Additional keys of Megatron's configuration.
    """

    json: dict[str, Any]
    shape: ModelShape
    eps: float
    frequencies: Tensor
    scale: float | None
    window: int | None
    windowed: tuple[bool, ...]
    router: ExpertRouter | None
    options: dict[str, Any]


def check_layers(on_gpu: bool) -> None:
    """ValueError if there are no layers for the device. On GPUs, these are Transformer Engine's, which Megatron-Core
    imports only if it is installed."""
    if on_gpu and (lacking := SPEC.missing_on_gpu()):
        raise ValueError(f"trainer.engine: megatron is not fully installed; {lacking}")


def describe(folder: Path) -> Description:
    """Describe the folder's model. ValueError if Megatron-Core cannot train it here."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model.path {folder}: no config.json; give a folder in Hugging Face layout")
    try:
        content = json.loads(path.read_text())
        hf: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        problems = list(lacking(None, content))
        shape = None if problems else with_decoder(read_shape(content))
    except (ValueError, KeyError, OSError, CannotPlanError) as error:
        raise ValueError(
            f"model.path {folder}: config.json describes no model: {' '.join(str(error).split())}"
        ) from error
    if shape is None:
        raise ValueError(f"model.path {folder}: the megatron trainer {problems[0]}; use trainer.engine=fsdp2")
    family = family_of(content.get("model_type")).megatron
    assert family is not None, "checked above"
    frequencies, scaling = _rotation(hf, shape)
    windowed = _windowed(hf, shape)
    return Description(
        json=content,
        shape=shape,
        eps=float(hf.rms_norm_eps),
        frequencies=frequencies,
        # Queries and keys are scaled by transformers, and scores here.
        scale=shape.head_dim**-0.5 * scaling**2 if scaling != 1.0 and shape.latent is None else None,
        window=getattr(hf, "sliding_window", None) if any(windowed) else None,
        windowed=windowed,
        router=family_of(content.get("model_type")).router(content) if shape.num_experts else None,
        options=family.options(content) | (latent_options(shape, hf) if shape.latent is not None else {}),
    )


def _rotation(hf: Any, shape: ModelShape) -> tuple[Tensor, float]:
    """The rotary embedding's frequencies, and the factor of what it rotates."""
    rope = getattr(hf, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
        return frequencies, float(scaling)
    rotated = shape.head_dim if shape.latent is None else shape.latent.rope
    if shape.decoder.partly_rotated:
        rotated = int(rotated * rope.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    return 1.0 / (rope.get("rope_theta", 10000.0) ** exponents), 1.0


def _windowed(hf: Any, shape: ModelShape) -> tuple[bool, ...]:
    """Whether each layer has a sliding window."""
    # transformers changes the model_type of a mistral with layer_types
    decoder = family_of(hf.model_type).decoder or shape.decoder
    if decoder.windows == "by layer":
        return tuple(kind == SLIDING for kind in hf.layer_types)
    return (decoder.windows == "all" and hf.sliding_window is not None,) * shape.num_layers


def initialize_parallel(megatron: MegatronConfig) -> None:
    """Create Megatron's process groups for these sizes on the default group. Engines of one process share them if their
    sizes are equal; otherwise, only the last engine can be used. Collective over the default group."""
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": megatron.tensor_parallel,
        "pipeline_model_parallel_size": megatron.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": _virtual(megatron),
        "context_parallel_size": megatron.context_parallel,
        "expert_model_parallel_size": megatron.expert_parallel,
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel,
    }
    if [dist.group.WORLD, sizes] == _INITIALIZED:
        return
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    minutes = UNCOUNTED // timedelta(minutes=1)
    parallel_state.initialize_model_parallel(
        **sizes, create_gloo_process_groups=False, distributed_timeout_minutes=minutes
    )
    _INITIALIZED[:] = [dist.group.WORLD, sizes]
    state = torch.get_rng_state()
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)  # nothing is drawn: there is no dropout
    torch.set_rng_state(state)


def _virtual(megatron: MegatronConfig) -> int | None:
    return megatron.virtual_pipeline if megatron.virtual_pipeline > 1 else None


def recomputation(megatron: MegatronConfig, on_gpu: bool) -> dict[str, Any]:
    """Megatron's keys for `recompute`. Recomputing attention on a GPU would save no memory, because Transformer
    Engine's fused attention keeps no scores."""
    if megatron.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if megatron.recompute == "selective" and not on_gpu:
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def transformer_config(
    model: Description, megatron: MegatronConfig, dtype: torch.dtype, *, deterministic: bool
) -> TransformerConfig:
    """Megatron's configuration of the model for these sizes."""
    shape, on_cuda = model.shape, torch.cuda.is_available()
    options: dict[str, Any] = {}
    if shape.num_experts:
        options |= {
            "num_moe_experts": shape.num_experts,
            "moe_ffn_hidden_size": shape.expert_size,
            "moe_router_topk": shape.experts_per_token,
            "moe_router_load_balancing_type": "none",
            "moe_shared_expert_intermediate_size": shape.shared_size or None,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": on_cuda,
            "moe_layer_freq": [int(layer in shape.expert_layers) for layer in range(shape.num_layers)],
        }
    if model.router is not None:
        options |= router_options(model.router)
    if model.window is not None:
        options |= {"window_size": (model.window - 1, 0), "window_attn_skip_freq": [*map(int, model.windowed)]}
    if recurrent := delta_layers(shape):
        options["linear_attention_freq"] = [int(layer in recurrent) for layer in range(shape.num_layers)]
    options |= recomputation(megatron, on_cuda) | model.options
    options["activation_func"] = ACTIVATIONS[options.get("activation_func", "silu")]
    biased = options.setdefault("add_bias_linear", False)
    latent = shape.latent is not None
    return (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=model.eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.decoder.qk_norm or latent,
        softmax_scale=model.scale,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=megatron.tensor_parallel,
        sequence_parallel=megatron.sequence_parallel,
        pipeline_model_parallel_size=megatron.pipeline_parallel,
        virtual_pipeline_model_parallel_size=_virtual(megatron),
        context_parallel_size=megatron.context_parallel,
        expert_model_parallel_size=megatron.expert_parallel,
        expert_tensor_parallel_size=megatron.expert_tensor_parallel,
        **{key: getattr(megatron, key) for key in (*COUNTED, *ENDS)},
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # With two stages, a stage's two neighbours are one rank, which would confuse the lengths of the two directions.
        variable_seq_lengths=megatron.pipeline_parallel > 1 and megatron.virtual_pipeline == 1,
        overlap_p2p_comm=megatron.virtual_pipeline > 1,
        batch_p2p_comm=megatron.virtual_pipeline == 1,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,  # gradients are summed; losses are divided by global counts
        perform_initialization=False,  # the weights come from a folder
        use_cpu_initialization=not on_cuda,
        deterministic_mode=deterministic,
        bias_activation_fusion=on_cuda,
        bias_dropout_fusion=on_cuda and not biased,  # grouped experts with biases have no fused form
        masked_softmax_fusion=False,
        apply_rope_fusion=on_cuda and not latent,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **options,
    )


@dataclass(frozen=True)
class Prediction:
    """What the last stage computes: log-probs and, if requested, entropies and divergences of `targets`, int64 [N],
    from the states at `before`, int64 [N], which are indices among this rank's tokens. Of a teacher: with `top_k`, the
    most probable tokens and their log-probs, or with `states` these states."""

    before: Tensor
    targets: Tensor
    temperature: float
    chunk_tokens: int
    entropy: bool = False
    float32_head: bool = False
    taught: Taught | None = None
    top_k: int = 0
    states: bool = False


class LogprobsModel(GPTModel):
    """GPTModel whose last stage returns what a Prediction asks, passed as its labels: (log-probs, entropies,
    divergences), float32 [N], without those not asked; or (tokens int32 [N, k], log-probs float32 [N, k]); or (states
    [N, h],)."""

    words: int  # vocabulary size without padding

    def _postprocess(self, hidden_states: Tensor, labels: Prediction | None = None, **_: Any) -> Any:
        if not self.post_process:
            return hidden_states
        assert labels is not None
        group = parallel_state.get_tensor_model_parallel_group()
        if self.config.sequence_parallel:  # in both cases, the exchange sums gradients over the group
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        states = hidden_states[:, 0].index_select(0, labels.before)
        if labels.states:
            return (states,)
        own = self.output_layer.weight
        weight = self.shared_embedding_or_output_weight() if own is None else own
        part, head = VocabularyPart.of_rank(len(weight), self.words, group), Head(float32=labels.float32_head)
        options: dict[str, Any] = {"head": head, "chunk_tokens": labels.chunk_tokens, "part": part}
        if labels.top_k:
            return teacher_top_k(states, weight, None, labels.top_k, temperature=labels.temperature, **options)
        found = vocabulary_logprobs(
            states,
            weight,
            labels.targets,
            vocab_size=self.words,
            temperature=labels.temperature,
            chunk_tokens=labels.chunk_tokens,
            entropy=labels.entropy,
            float32_head=labels.float32_head,
            group=group,
        )
        taught = labels.taught
        divergences = None if taught is None else token_divergence(states, weight, None, taught, **options)
        return tuple(values for values in (*found, divergences) if values is not None)


def build(
    model: Description,
    megatron: MegatronConfig,
    config: TransformerConfig,
    chunk_class: type[GPTModel] = LogprobsModel,
) -> list[GPTModel]:
    """The uninitialised chunks of layers of this rank's stage. Collective over the default group."""
    stages = split_layers(model.shape.num_layers, megatron)
    assert stages is not None, "checked before"
    stage = stages[parallel_state.get_pipeline_model_parallel_rank()]
    chunks = []
    for number, layers in enumerate(stage):
        stage_options: dict[str, Any] = {"vp_stage": number if len(stage) > 1 else None}
        on_cuda = torch.cuda.is_available()
        spec = get_gpt_decoder_block_spec(config, on_cuda, normalization="RMSNorm", **stage_options)
        if not on_cuda:
            spec = dataclasses.replace(spec, layer_norm=RMSNorm)
            for layer in spec.layer_specs:
                _use_own_layers(layer.submodules, model.shape, config)
        if (sizes := delta_sizes(model.shape)) is not None:
            recurrent = delta_layers(model.shape)
            every = [
                _delta_layer(spec_of_layer, sizes) if layer in recurrent else spec_of_layer
                for layer, spec_of_layer in zip(layers, spec.layer_specs, strict=True)
            ]
            spec = dataclasses.replace(spec, layer_specs=every)
        chunk = chunk_class(
            config,
            spec,
            vocab_size=padded_vocabulary(model.shape.vocab_size, megatron),
            max_sequence_length=int(model.json.get("max_position_embeddings", 0)),
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage_options),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage_options),
            share_embeddings_and_output_weights=model.shape.tied,
            position_embedding_type="rope",
            **stage_options,
        )
        chunk.words = model.shape.vocab_size
        rotaries = [chunk]
        if model.shape.latent is not None:
            rotaries = [layer.self_attention for layer in chunk.decoder.layers]
            for norm in _latent_norms(chunk):
                norm.eps = LATENT_EPS
        for owner in rotaries:
            owner.rotary_pos_emb.inv_freq = model.frequencies.to(torch.cuda.current_device())
        built = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        assert built == list(layers), f"Megatron-Core built the layers {built}, not {layers}"
        chunks.append(chunk)
    if model.router is not None:
        choose_groups(chunks, model.router)
    return chunks


def _latent_norms(chunk: GPTModel) -> Iterator[Any]:
    """The latent norms, which are separate modules or fused with the projections after them."""
    for layer in chunk.decoder.layers:
        attention = layer.self_attention
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            if hasattr(module := getattr(attention, name, None), "eps"):
                yield module


def _delta_layer(layer: ModuleSpec, sizes: DeltaSizes) -> ModuleSpec:
    """A layer with a gated delta rule instead of attention, and with a norm of its own before it."""
    own = layer.submodules
    names = own.sharded_state_dict_keys_map.items()
    inside = dataclasses.replace(
        own,
        input_layernorm=RMSNorm,
        self_attention=ModuleSpec(module=DeltaMixer, params={"sizes": sizes}),
        sharded_state_dict_keys_map={at: name for at, name in names if not at.startswith("input_layernorm")},
    )
    return dataclasses.replace(layer, submodules=inside)


def _use_own_layers(submodules: Any, shape: ModelShape, config: TransformerConfig) -> None:
    submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
    experts = getattr(submodules.mlp.submodules, "experts", None)
    if config.add_bias_linear and experts is not None:
        experts.submodules.linear_fc2 = BiasedRowParallelLinear
    attention = submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if shape.latent is not None:
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
        # Megatron's local layers split these two and gather the latents, but lose the gradient from other
        # tensor-parallel ranks' heads to the rotary part. So each rank has a copy, as with Transformer Engine.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    elif shape.decoder.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
