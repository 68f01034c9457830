"""DeepSpeed ZeRO, for any decoder of transformers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from hpcrl.engines.train.fsdp2.spec import check_attention, unpackable
from hpcrl.engines.train.router_keys import frozen_routers
from hpcrl.models.transformers_models import untrainable
from hpcrl.spec.fields import NonNegative, Section
from hpcrl.spec.kinds import TrainEngineSpec
from hpcrl.spec.media import IMAGE
from hpcrl.spec.problems import Problem, engine_problem

AT = ("trainer", "deepspeed")
LOSSES = ("aux_loss", "z_loss")
"""Router losses, whose coefficients change results."""
BUCKET_NUMBERS = 500_000_000
"""DeepSpeed's default size of the buffers in which it reduces gradients and gathers parameters."""
GIVEN = {
    "bf16": "trainer.param_dtype",
    "bfloat16": "trainer.param_dtype",
    "fp16": "trainer.param_dtype",
    "communication_data_type": "",
    "data_types": "",
    "gradient_accumulation_steps": "trainer.max_tokens_per_micro_batch",
    "gradient_clipping": "trainer.max_grad_norm",
    "managed_gradient_accumulation": "",
    "optimizer": "trainer.lr, trainer.betas, trainer.eps and trainer.weight_decay",
    "scheduler": "trainer.lr_schedule",
    "train_batch_size": "trainer.max_tokens_per_micro_batch",
    "train_micro_batch_size_per_gpu": "trainer.max_tokens_per_micro_batch",
    "zero_force_ds_cpu_optimizer": "",
}
"""Maps keys of DeepSpeed's configuration that hpcrl sets to the key to use instead; empty if there is none."""
GIVEN_OF_ZERO = {
    "stage": "trainer.deepspeed.zero_stage",
    "offload_optimizer": "trainer.deepspeed.offload_optimizer",
    "offload_param": "trainer.deepspeed.offload_parameters",
    "memory_efficient_linear": "",
}
"""Like GIVEN, for keys of the section zero_optimization."""


class DeepSpeedConfig(Section):
    """How DeepSpeed shards the model's state over the trainer's ranks."""

    zero_stage: Literal[1, 2, 3] = 3
    """What is sharded: 1: optimizer state and fp32 weights; 2: also gradients; 3: also parameters."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Keep optimizer state and fp32 weights in host memory (cpu) or in files of nvme_path; AdamW runs on the host."""
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    """Keep parameters in host memory (cpu) or in files of nvme_path; zero_stage 3 only."""
    nvme_path: str = ""
    """A folder on a disk of each node, where nvme keeps tensors in files without names; each node expands $TMPDIR and
    other variables itself."""
    packing: Literal["auto", "require", "off"] = "auto"
    """See trainer.fsdp2.packing."""
    attention: Literal["auto", "flash", "sdpa"] = "auto"
    """See trainer.fsdp2.attention."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    aux_loss: NonNegative = 0.0
    """See trainer.fsdp2.aux_loss."""
    z_loss: NonNegative = 0.0
    """See trainer.fsdp2.z_loss."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Additional keys of DeepSpeed's configuration, as {zero_optimization: {reduce_bucket_size: 100000000}}. DeepSpeed
    checks them when the trainer starts."""


def _problem(key: str, text: str) -> Problem:
    return Problem((*AT, key), f"trainer.deepspeed.{key}: {text}")


def _check(config: Any) -> Iterator[Problem]:
    own = config.trainer.section(DeepSpeedConfig)
    if own.offload_parameters != "none" and own.zero_stage < 3:
        yield _problem(
            "offload_parameters", f"ZeRO-{own.zero_stage} does not divide parameters; set zero_stage=3 or none"
        )
    if bool(own.nvme_path) != ("nvme" in (own.offload_optimizer, own.offload_parameters)):
        yield _problem("nvme_path", "goes together with offload_optimizer=nvme or offload_parameters=nvme")
    elif own.nvme_path and not own.nvme_path.startswith(("/", "$")):
        yield _problem("nvme_path", f"a folder of each node by its full path or in a variable, not {own.nvme_path!r}")
    yield from check_attention(config, own, AT)
    yield from frozen_routers(config, own, functools.partial(engine_problem, AT))
    yield from _check_options(own.options, GIVEN, "")
    zero = own.options.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield _problem("options", f"zero_optimization is a section of keys, not {zero!r}")
        return
    size = zero.get("reduce_bucket_size", 1)
    if isinstance(size, bool) or not isinstance(size, int | float) or size < 1:
        yield _problem("options", f"zero_optimization.reduce_bucket_size is a number of gradients, not {size!r}")
    yield from _check_options(zero, GIVEN_OF_ZERO, "zero_optimization.")


def _lacking(own: DeepSpeedConfig, model: Mapping[str, Any]) -> Iterator[str]:
    yield from untrainable(model)
    if own.packing == "require" and (why := unpackable(model)):
        yield f"cannot pack it ({why}), which trainer.deepspeed.packing=require needs"


def _check_options(options: dict[str, Any], given: dict[str, str], section: str) -> Iterator[Problem]:
    for name in sorted(options.keys() & given.keys()):
        how = f"set {given[name]} instead" if given[name] else "leave it out"
        yield _problem("options", f"{section}{name} is set by hpcrl; {how}")


SPEC = TrainEngineSpec(
    about="DeepSpeed ZeRO, for any decoder of transformers.",
    make="hpcrl.engines.train.deepspeed.engine:make",
    section=DeepSpeedConfig,
    media=frozenset({IMAGE}),
    check=_check,
    unsupported=_lacking,
    plan="hpcrl.engines.train.deepspeed.memory:PLAN",
    needs={"deepspeed": "deepspeed"},
    tested_versions={"deepspeed": "0.19"},
    resume_keys=tuple(key for key in DeepSpeedConfig.model_fields if key not in ("packing", "options", *LOSSES)),
    segments=True,
    computes=frozenset({"entropy", "divergence"}),
    teaches=frozenset({"sampled", "top_k", "full"}),
    deterministic=True,
    float32_head=True,
    exchanges_state=True,
    exchanges_adapters=True,
    freezes=True,
    lora=True,
    adapts_critic=True,
    router_replay=True,
    policy_keys=LOSSES,
    make_critic="hpcrl.engines.train.deepspeed.critic:make",
)
