"""Specification of generator.engine=sglang."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from hpcrl.models.families import SGLANG_SEEING
from hpcrl.spec.fields import NUMBER, Section
from hpcrl.spec.installed import fields, unknown_options
from hpcrl.spec.kinds import GenEngineSpec
from hpcrl.spec.media import IMAGE
from hpcrl.spec.problems import Problem
from hpcrl.spec.weight_layout import RequiredSlices, all_weights

OWN = {
    "model_path": "model.path",
    "tokenizer_path": "model.path",
    "dtype": "generator.dtype",
    "enable_fp32_lm_head": "generator.head_dtype",
    "max_running_requests": "generator.max_num_seqs",
    "context_length": "data.max_prompt_tokens and rollout.max_new_tokens",
    "tp_size": "layout.generator.tensor_parallel",
    "pp_size": "layout.generator.tensor_parallel",
    "dp_size": "layout.generator.num_ranks",
    "enable_memory_saver": "layout.generator",
    "max_total_tokens": "generator.sglang.kv_cache_gib",
    "mem_fraction_static": "generator.sglang.mem_fraction_static",
    "random_seed": "seed",
    **dict.fromkeys(
        (
            "base_gpu_id",
            "enable_deterministic_inference",
            "enable_multimodal",
            "language_model_only",
            "load_format",
            "nnodes",
            "node_rank",
            "sampling_mask_max_tokens",
            "skip_tokenizer_init",
            "speculative_algorithm",
        ),
        "",
    ),
}
"""Arguments of SGLang that hpcrl sets or relies on, and the keys that set them."""

BESIDE_SHARE = 0.5
"""Default share of a GPU that other roles also use."""
MAX_KEPT = 4096
"""Largest top_k for which SGLang returns log-probs after truncation (its sampling_mask_max_tokens)."""
TRUNCATED = (
    f"SGLang gives the log-probs of truncated sampling, which corrections need, only with top_k up to {MAX_KEPT}"
)


class SGLangConfig(Section):
    """SGLang, in separate processes next to the first rank of each replica."""

    kv_cache_gib: Annotated[float, Field(gt=0), NUMBER] | None = None
    """KV cache on the GPU of each rank, GiB; null: what mem_fraction_static leaves."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1), NUMBER] | None = None
    """Share of the GPU for weights and KV cache; null: SGLang's choice, with a trainer on the same GPU 0.5."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of SGLang's ServerArgs, by name. SGLang checks their values when the generator starts."""


def _check(config: Any) -> Iterator[Problem]:
    options, rollout = config.generator.section(SGLangConfig).options, config.rollout
    path = ("generator", "sglang", "options")
    for name in sorted(options.keys() & OWN.keys()):
        how = f"is set by hpcrl; set {OWN[name]} instead" if OWN[name] else "is reserved; leave it out"
        yield Problem(path, f"generator.sglang.options: {name} {how}")
    if options and config.cluster.container == "none":
        known = fields("sglang", "srt/arg_groups/fields/*.py")  # these files define SGLang's arguments
        yield from unknown_options(path, options, known, "sglang", "ServerArgs of SGLang")
    if rollout.min_p:
        text = "SGLang cannot draw with min_p from a response's own seed; use 0 with top_p or top_k, or another engine"
        yield Problem(("rollout", "min_p"), f"rollout.min_p: {text}")
    if rollout.top_k > MAX_KEPT:
        yield Problem(("rollout", "top_k"), f"rollout.top_k: {rollout.top_k}, but {TRUNCATED}; use less")


def _notes(config: Any) -> Iterator[str]:
    rollout = config.rollout
    if config.generator.engine == "sglang" and rollout.top_p < 1 and rollout.top_k:
        yield (
            f"SGLang takes rollout.top_p={rollout.top_p:g} of all tokens, other engines of those that "
            f"rollout.top_k={rollout.top_k} keeps"
        )


def share(config: Any) -> float | None:
    """SGLang's mem_fraction_static; None leaves it to SGLang."""
    given: float | None = config.generator.section(SGLangConfig).mem_fraction_static
    return given or (BESIDE_SHARE if config.layout.generator.colocate_with is not None else None)


def _need(config: Any, model: Any, name: str, shape: Sequence[int], index: int, num_ranks: int) -> RequiredSlices:
    """The first rank requires all weights, and passes them to SGLang; the other ranks require none."""
    return all_weights(config, model, name, shape, index, num_ranks) if index == 0 else RequiredSlices("", ())


KEPT_IMAGE_TOKENS = 14_000
"""SGLang keeps 100 MiB of tower outputs (SGLANG_VLM_CACHE_SIZE_MB): these are as many of 3584 values in bfloat16."""

SPEC = GenEngineSpec(
    about="SGLang; the first rank of a replica owns the engine.",
    needs={"sglang": "sglang"},
    required_versions={"sglang": "0.5.23"},
    make="hpcrl.engines.gen.sglang.engine:make",
    section=SGLangConfig,
    check=_check,
    notes=_notes,
    resume_keys=("kv_cache_gib", "mem_fraction_static"),
    required_slices=_need,
    tensor_parallel=True,
    recompute=True,
    float32_head=True,
    media=frozenset({IMAGE}),
    media_families=SGLANG_SEEING,
    kept_image_tokens=KEPT_IMAGE_TOKENS,
    plan="hpcrl.engines.gen.sglang.sizes:cache",
    check_sizes="hpcrl.engines.gen.sglang.sizes:check",
    memory_share=lambda config: share(config) or 1.0,
    sleeps=True,
)
