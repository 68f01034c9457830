"""Specification of generator.engine=vllm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from hpcrl.spec.fields import NUMBER, Section
from hpcrl.spec.kinds import GenEngineSpec
from hpcrl.spec.problems import Problem

OWN = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "generator.dtype",
    "hf_overrides": "generator.head_dtype, or config.json of the model,",
    "max_num_seqs": "generator.max_slots",
    "max_model_len": "data.max_prompt_tokens and rollout.max_new_tokens",
    "tensor_parallel_size": "layout.generator.tensor_parallel",
    "data_parallel_size": "layout.generator.num_ranks",
    "pipeline_parallel_size": "layout.generator.tensor_parallel",
    "distributed_executor_backend": "layout.generator",
    "kv_cache_memory_bytes": "generator.vllm.kv_cache_gib",
    "gpu_memory_utilization": "generator.vllm.memory_share",
    "enforce_eager": "generator.vllm.eager",
    "enable_sleep_mode": "layout.generator",
    "seed": "seed",
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules", "lora_dtype"),
        "trainer.lora",
    ),
    **dict.fromkeys(("enable_return_routed_experts", "aux_output_config"), "trainer.router_replay"),
    **dict.fromkeys(("skip_tokenizer_init", "load_format", "async_scheduling", "speculative_config"), ""),
}
"""Arguments that hpcrl gives to vLLM, and the keys that set them."""

ALONE_SHARE, TURNS_SHARE, BESIDE_SHARE = 0.9, 0.8, 0.5
"""Default shares of a GPU: of an engine alone, of one that takes turns with a trainer, and of one beside a trainer."""


class VLLMConfig(Section):
    """vLLM, in the rank's own process."""

    kv_cache_gib: Annotated[float, Field(gt=0), NUMBER] | None = None
    """KV cache of each rank, GiB; null: what memory_share leaves; on a CPU, max_slots sequences of full length."""
    memory_share: Annotated[float, Field(gt=0, le=1), NUMBER] | None = None
    """Share of the GPU for weights, activations and KV cache; null: 0.9, beside a trainer on the same GPU 0.5, in turns
    with it (layout.offload) 0.8."""
    eager: bool = False
    """Capture no CUDA graphs: vLLM starts sooner and decodes more slowly. Always so on a CPU."""
    options: dict[str, Any] = Field(default_factory=dict)
    """More arguments of vLLM's EngineArgs, by name. vLLM checks them when the generator starts."""


def _check(config: Any) -> Iterator[Problem]:
    own = config.generator.section(VLLMConfig)
    for name in sorted(own.options.keys() & OWN.keys()):
        how = f"set {OWN[name]} instead" if OWN[name] else "leave it out"
        yield Problem(
            ("generator", "vllm", "options"), f"generator.vllm.options: {name} is given to vLLM by hpcrl; {how}"
        )


def shares_gpu(config: Any) -> bool:
    """Whether its ranks have other roles."""
    return config.layout.generator.colocate_with is not None


def _planned_share(config: Any) -> float:
    """Share that the plan counts: all with kv_cache_gib, which vLLM takes outside its share."""
    own = config.generator.section(VLLMConfig)
    return 1.0 if own.kv_cache_gib is not None else start_share(config)


def start_share(config: Any) -> float:
    """Share of the GPU that must be free when the engine is made, and of which the KV cache takes the rest."""
    given = config.generator.section(VLLMConfig).memory_share
    if given is not None or not shares_gpu(config):
        return given or ALONE_SHARE
    on_trainers, in_step = config.layout.generator.colocate_with == "trainer", config.rollout.max_lag == 0
    return TURNS_SHARE if on_trainers and in_step and config.layout.offload != "never" else BESIDE_SHARE


SPEC = GenEngineSpec(
    about="vLLM, in the rank's own process.",
    needs={"vllm": "vllm"},
    tested={"vllm": "0.32."},
    make="hpcrl.engines.gen.vllm.engine:make",
    section=VLLMConfig,
    check=_check,
    resume_keys=("kv_cache_gib", "memory_share", "eager"),
    tensor_parallel=True,
    recompute=True,
    float32_head=True,
    lora=True,
    gives_routes=True,
    plan="hpcrl.engines.gen.vllm.memory:cache",
    check_sizes="hpcrl.engines.gen.vllm.memory:check",
    memory_share=_planned_share,
    sleeps=True,
)
