"""Specification of generator.engine=vllm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Annotated, Any

from pydantic import Field

from hpcrl.engines.gen.vllm.slices import slices
from hpcrl.models.families import VLLM_SEEING
from hpcrl.spec.extras import version_of
from hpcrl.spec.fields import NUMBER, Section
from hpcrl.spec.installed import fields, folder_of, table_keys, unknown_options
from hpcrl.spec.kinds import GenEngineSpec
from hpcrl.spec.media import IMAGE
from hpcrl.spec.problems import Problem
from hpcrl.spec.weight_layout import RequiredSlices

OWN = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "generator.dtype",
    "hf_overrides": "generator.head_dtype, or config.json of the model,",
    "max_num_seqs": "generator.max_num_seqs",
    "max_model_len": "data.max_prompt_tokens and rollout.max_new_tokens",
    "tensor_parallel_size": "layout.generator.tensor_parallel",
    "data_parallel_size": "layout.generator.num_ranks",
    "pipeline_parallel_size": "layout.generator.tensor_parallel",
    "distributed_executor_backend": "layout.generator",
    "kv_cache_memory_bytes": "generator.vllm.kv_cache_gib",
    "gpu_memory_utilization": "generator.vllm.gpu_memory_utilization",
    "enforce_eager": "generator.vllm.enforce_eager",
    "disable_custom_all_reduce": "generator.vllm.custom_all_reduce",
    "enable_sleep_mode": "layout.generator",
    "seed": "seed",
    **dict.fromkeys(
        (
            *("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules", "lora_dtype"),
            "enable_tower_connector_lora",
        ),
        "trainer.lora",
    ),
    **dict.fromkeys(("enable_return_routed_experts", "aux_output_config"), "trainer.router_replay"),
    "mm_processor_kwargs": "data.max_pixels",
    **dict.fromkeys(("skip_tokenizer_init", "load_format", "async_scheduling", "speculative_config"), ""),
    **dict.fromkeys(("language_model_only", "mm_device_do_normalize", "mm_encoder_tp_mode"), ""),
}
"""Arguments of vLLM that hpcrl sets, and the keys that set them."""


MODELS = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
"""vLLM's tables of models that generate text."""
REPLACEABLE = ("_supports_attention_backend = True", "ALL_ATTENTION_FUNCTIONS")
"""Texts in transformers' code of a model whose attention can be replaced."""

ALONE_SHARE, TURNS_SHARE, BESIDE_SHARE = 0.9, 0.8, 0.5
"""Default shares of a GPU if the engine is without a trainer, takes turns with one, or runs at the same time as one."""


class VLLMConfig(Section):
    """vLLM, in the rank's own process."""

    kv_cache_gib: Annotated[float, Field(gt=0), NUMBER] | None = None
    """KV cache of each rank, GiB; null: the rest of gpu_memory_utilization; on a CPU, max_num_seqs sequences of full
    length."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1), NUMBER] | None = None
    """Share of the GPU for weights, activations and KV cache; null: 0.9, with a trainer on the same GPU 0.5, in turns
    with it (layout.offload) 0.8."""
    enforce_eager: bool = False
    """Capture no CUDA graphs: vLLM starts sooner and decodes more slowly. Always true on a CPU."""
    custom_all_reduce: bool = False
    """All-reduce over a replica's ranks with vLLM's own kernel instead of NCCL, where NVLink connects their GPUs. A
    rank then sees all GPUs of its replica, its own first. Off by default, as it has not been tried on GPUs."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of vLLM's EngineArgs, by name. vLLM checks their values when the generator starts."""

    @property
    def kv_cache_bytes(self) -> int | None:
        """kv_cache_gib in bytes."""
        return None if self.kv_cache_gib is None else int(self.kv_cache_gib * 2**30)


def _check(config: Any) -> Iterator[Problem]:
    path, options = ("generator", "vllm", "options"), config.generator.section(VLLMConfig).options
    for name in sorted(options.keys() & OWN.keys()):
        how = f"set {OWN[name]} instead" if OWN[name] else "leave it out"
        yield Problem(path, f"generator.vllm.options: {name} is set by hpcrl; {how}")
    if options and config.cluster.container == "none":
        known = fields("vllm", "engine/arg_utils.py", "EngineArgs")
        yield from unknown_options(path, options, known, "vllm", "EngineArgs of vLLM")


def _unsupported(model: Mapping[str, Any], longest: int) -> Iterator[str]:
    """Report an architecture that neither the installed vLLM nor one of its plug-ins implements, and that transformers
    does not implement with replaceable attention."""
    aspect = model.get("vision_aspect_ratio", LLAVA_ASPECT)
    if aspect != LLAVA_ASPECT:  # a key of LLaVA-OneVision
        yield f"vision_aspect_ratio={aspect} (only {LLAVA_ASPECT})"
    if model.get("model_type") in TIED and model.get("tie_word_embeddings") is False:
        yield f"tie_word_embeddings=false of model_type={model['model_type']}, whose head is always the embedding there"
    own = table_keys("vllm", "model_executor/models/registry.py", MODELS)
    given = model.get("architectures")
    names = [str(name) for name in given] if isinstance(given, list) else []
    plugins = [e for e in entry_points(group="vllm.general_plugins") if e.module.partition(".")[0] != "vllm"]
    if not own or not names or own & {*names} or plugins or model.get("auto_map"):
        return
    transformers, family = folder_of("transformers"), str(model.get("model_type")).replace("-", "_")
    file = transformers and transformers / "models" / family / f"modeling_{family}.py"
    if not (file and file.is_file() and any(word in file.read_text() for word in REPLACEABLE)):
        yield f"a model for {', '.join(names)} (vLLM {version_of('vllm')})"


def shares_gpu(config: Any) -> bool:
    """Whether the generator's ranks also have other roles."""
    return config.layout.generator.colocate_with is not None


def _planned_share(config: Any) -> float:
    """The share for the plan; 1 with kv_cache_gib, which vLLM does not count in its share."""
    own = config.generator.section(VLLMConfig)
    return 1.0 if own.kv_cache_gib is not None else start_share(config)


def start_share(config: Any) -> float:
    """The share of the GPU that must be free when the engine starts; the KV cache gets the rest of this share."""
    given = config.generator.section(VLLMConfig).gpu_memory_utilization
    if given is not None or not shares_gpu(config):
        return given or ALONE_SHARE
    on_trainers, in_step = config.layout.generator.colocate_with == "trainer", config.rollout.max_staleness == 0
    return TURNS_SHARE if on_trainers and in_step and config.layout.offload != "never" else BESIDE_SHARE


def _need(config: Any, model: Any, name: str, shape: tuple[int, ...], index: int, num_ranks: int) -> RequiredSlices:
    """The slices of each tensor that vLLM's loaders read."""
    options = config.generator.section(VLLMConfig).options
    return RequiredSlices(config.generator.dtype, slices(options, model, name, shape, index, num_ranks))


TIED = ("lfm2", "lfm2_moe")
"""vLLM's classes of these compute logits with the embedding, whatever config.json says."""
LLAVA_ASPECT = "anyres_max_9"
"""vLLM's class of LLaVA-OneVision ignores other values of config.json, and would compute other features."""
KEPT_IMAGE_TOKENS = 2048
"""vLLM's own max_num_batched_tokens, to which its encoder cache is limited; a larger image raises the limit."""

SPEC = GenEngineSpec(
    about="vLLM, in the rank's own process.",
    needs={"vllm": "vllm"},
    required_versions={"vllm": "0.32."},
    make="hpcrl.engines.gen.vllm.engine:make",
    section=VLLMConfig,
    check=_check,
    unsupported=_unsupported,
    resume_keys=("kv_cache_gib", "gpu_memory_utilization", "enforce_eager", "custom_all_reduce"),
    required_slices=_need,
    tensor_parallel=True,
    recompute=True,
    float32_head=True,
    lora=True,
    media=frozenset({IMAGE}),
    media_families=VLLM_SEEING,
    records_routes=True,
    kept_image_tokens=KEPT_IMAGE_TOKENS,
    reserves_for_images=True,
    plan="hpcrl.engines.gen.vllm.memory:cache",
    check_sizes="hpcrl.engines.gen.vllm.memory:check",
    memory_share=_planned_share,
    keeps_weights=True,
    sleeps=True,
    shows_peers=lambda config: config.generator.section(VLLMConfig).custom_all_reduce,
)
