"""PyTorch FSDP2, for any decoder of transformers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from hpcrl.engines.train.router_keys import ROUTER_KEYS, frozen_routers
from hpcrl.models.alibi import ALIBI
from hpcrl.models.families import family_of
from hpcrl.models.rope import LENGTH_DEPENDENT, rope_types
from hpcrl.models.transformers_models import untrainable
from hpcrl.spec.division import Division, DivisionError
from hpcrl.spec.fields import NonNegative, Positive, PositiveFloat, Section
from hpcrl.spec.kinds import ADAMW, Spec, TrainEngineSpec
from hpcrl.spec.media import IMAGE
from hpcrl.spec.problems import Problem, engine_problem

AT = ("trainer", "fsdp2")
SPLITS = ("replicas", "tensor_parallel", "context_parallel", "expert_parallel")
"""Keys that are numbers of ranks."""
problem = functools.partial(engine_problem, AT)


class FSDP2Config(Section):
    """How FSDP2 runs the model."""

    packing: Literal["auto", "require", "off"] = "auto"
    """Pack several sequences into a row; auto: if a probe at load succeeds, and not for rope_type dynamic and longrope;
    require: stop if it fails."""
    attention: Literal["auto", "flash", "sdpa"] = "auto"
    """Attention over packed sequences; flash: a kernel for sequences of different lengths, from flash-attn if
    installed, else torch's own, on GPUs in bfloat16; sdpa: torch's scaled_dot_product_attention over blocks of
    sequences of similar length; auto: flash if a test at the model's sizes gives sdpa's results."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory."""
    replicas: Positive = 1
    """Copies of the model (HSDP): ranks gather parameters within their copy, and sum gradients over all copies."""
    tensor_parallel: Positive = 1
    """Ranks over which matrices are split by transformers' plan and whole experts are distributed; other modules split
    the tokens over these ranks."""
    context_parallel: Positive = 1
    """Ranks over which the tokens of sequences are split; for attention they exchange tokens for heads."""
    expert_parallel: Positive = 1
    """Mixture of experts: consecutive ranks over which the whole experts of a layer are distributed. They have
    different rows, and send tokens to the ranks of their experts. The other parameters are sharded over all ranks."""
    aux_loss: NonNegative = 0.0
    """Mixture of experts: coefficient of the load-balancing loss of each sequence and layer, averaged over sequences
    (arXiv 2101.03961; per sequence: arXiv 2412.19437)."""
    z_loss: NonNegative = 0.0
    """Mixture of experts: coefficient of the mean squared log-sum-exp of router logits (arXiv 2202.08906), per sequence
    and layer, averaged over sequences."""
    expert_bias_rate: NonNegative = 0.0
    """Mixture of experts whose routers have a bias per expert (DeepSeek-V3, GLM-4.5): change of a bias in a step,
    towards an even load (arXiv 2408.15664; .001 in DeepSeek-V3's own training). 0: biases do not change."""

    mtp_loss: PositiveFloat = 0.1
    """With model.mtp=train: coefficient of the mean cross-entropy of the multi-token prediction layers (arXiv
    2412.19437), averaged over layers, whose gradients reach only these."""

    @property
    def ranks_of_a_row(self) -> int:
        """Ranks that work on the same rows."""
        return self.tensor_parallel * self.context_parallel

    def num_shards(self, num_ranks: int) -> int:
        """Ranks that share a parameter other than an expert's, or their part of a split matrix."""
        return num_ranks // (self.replicas * self.tensor_parallel)

    def num_expert_shards(self, num_ranks: int) -> int:
        """Ranks that share their part of the experts of a layer."""
        return self.num_shards(num_ranks) // self.expert_parallel


def divide(config: Any, num_ranks: int) -> Division:
    """Neighbouring ranks work on the same rows, and each of them has all outputs. The copies of the model have
    consecutive ranks. Every rank yields all weights."""
    own: FSDP2Config = config.trainer.section(FSDP2Config)
    if num_ranks % (size := own.replicas * own.ranks_of_a_row):
        text = (
            f"replicas {own.replicas} x tensor {own.tensor_parallel} x context {own.context_parallel} = {size} ranks, "
            f"and the layout gives {num_ranks}, which is not a multiple of it"
        )
        keys = ("replicas", "tensor_parallel", "context_parallel")
        first, *others = sorted(keys, key=lambda key: -getattr(own, key))
        raise DivisionError([problem(first, text, *others)])
    if num_ranks % own.expert_parallel:
        raise DivisionError(
            [problem("expert_parallel", f"{own.expert_parallel} does not divide the {num_ranks} ranks")]
        )
    width = own.ranks_of_a_row
    groups = tuple(tuple(range(first, first + width)) for first in range(0, num_ranks, width))
    return Division(groups, tuple(group[0] for group in groups), (tuple(range(num_ranks)),))


def indivisible_heads(own: FSDP2Config, num_heads: int, num_kv_heads: int) -> Iterator[Problem]:
    """Why ranks with the same rows cannot split the attention heads. Context-parallel ranks may share a key head."""
    tensor, context = own.tensor_parallel, own.context_parallel
    for what, count in (("attention heads", num_heads), ("key and value heads", num_kv_heads)):
        if count % tensor:
            yield problem("tensor_parallel", f"{tensor} does not divide the {count} {what}")
            return
    heads, kv_heads = num_heads // tensor, num_kv_heads // tensor
    of_each = f" of each of {tensor} tensor parallel ranks" if tensor > 1 else ""
    if heads % context:
        text = f"{context} does not divide the {heads} attention heads{of_each}"
        yield problem("context_parallel", text, "tensor_parallel")
    elif kv_heads % context and context % kv_heads:
        text = f"{context} neither divides the {kv_heads} key and value heads{of_each} nor is a multiple of them"
        yield problem("context_parallel", text, "tensor_parallel")


def unpackable(model: Mapping[str, Any]) -> str:
    """Why sequences of this config.json's model cannot be packed; empty if the probe must decide.

    With some rotary embeddings, transformers rotates by the length of the longest sequence in a forward pass. A short
    sequence packed with a long one would be rotated like the long one, and the probe's sequences are too short to
    detect this.
    """
    if why := family_of(model.get("model_type")).unpackable or (ALIBI if model.get("alibi") else ""):
        return why
    rope = rope_types(model).intersection(LENGTH_DEPENDENT)
    return f"rope_type={min(rope)} rotates by the length of the longest sequence in a forward" if rope else ""


def lacking(own: FSDP2Config, model: Mapping[str, Any]) -> Iterator[str]:
    """See TrainEngineSpec.unsupported."""
    yield from untrainable(model)
    wanted = [f"{key}={getattr(own, key)}" for key in ("tensor_parallel", "context_parallel") if getattr(own, key) > 1]
    wanted += ["packing=require"] if own.packing == "require" else []
    if wanted and (why := unpackable(model)):
        yield f"cannot pack it ({why}), which trainer.fsdp2.{' '.join(wanted)} needs"


def is_unsharded(config: Any, num_ranks: int) -> bool:
    """Whether a single rank has plain parameters (FSDP2Engine.sharded is False)."""
    own = config.trainer.section(FSDP2Config)
    return num_ranks == 1 and config.base_dtype == config.trainer.param_dtype and not own.cpu_offload


def check_attention(config: Any, own: Any, at: tuple[str, str]) -> Iterator[Problem]:
    """Report flash kernels that `own` (the section `at`) requires but that cannot run."""
    fits = config.trainer.param_dtype != "float32" and own.packing != "off" and config.cluster.device != "cpu"
    if own.attention == "flash" and not fits:
        text = "flash needs GPUs, trainer.param_dtype=bfloat16 and packing; use auto"
        yield Problem((*at, "attention"), f"{'.'.join(at)}.attention: {text}")


def _check(config: Any) -> Iterator[Problem]:
    own = config.trainer.section(FSDP2Config)
    yield from _check_experts(config, own)
    yield from check_attention(config, own, AT)
    yield from frozen_routers(config, own, problem)
    yield from _check_mtp(config, own)
    if config.lora is not None and own.tensor_parallel > 1:
        used = {"dropout": config.lora.dropout > 0, "parts=[experts]": "experts" in config.lora.parts}
        for key in [key for key, is_used in used.items() if is_used]:
            text = f"{own.tensor_parallel} needs trainer.lora without {key}; use 1, and context_parallel or replicas"
            involved = (("trainer", "lora"), ("trainer", "fsdp2", "context_parallel"))
            yield Problem((*AT, "tensor_parallel"), f"trainer.fsdp2.tensor_parallel: {text}", involved)


def _check_experts(config: Any, own: FSDP2Config) -> Iterator[Problem]:
    """Report what is not combined with expert parallelism."""
    if own.expert_parallel == 1:
        return
    for key in SPLITS:
        if key != "expert_parallel" and getattr(own, key) > 1:
            text = f"{own.expert_parallel} distributes experts over ranks of one copy that have different, whole rows"
            yield problem("expert_parallel", f"{text}, without {key}; use 1 for one of them", key)
    if config.lora is not None:
        text = f"{own.expert_parallel}, but experts of models with adapters are not distributed; use 1"
        yield Problem((*AT, "expert_parallel"), f"trainer.fsdp2.expert_parallel: {text}", (("trainer", "lora"),))


def _check_mtp(config: Any, own: FSDP2Config) -> Iterator[Problem]:
    """Report what the training of MTP layers does not support."""
    if config.model.mtp != "train":
        return
    keys = ("tensor_parallel", "context_parallel", "expert_parallel")
    split = {f"trainer.fsdp2.{key}": getattr(own, key) > 1 for key in keys}
    whole = {"trainer.lora": config.lora is not None, "trainer.freeze": bool(config.trainer.freeze)}
    for key in [key for key, used in (split | whole).items() if used]:
        text = f"train needs whole layers of the policy, all trained, without {key}; use keep"
        yield Problem(("model", "mtp"), f"model.mtp: {text}", (tuple(key.split(".")),))


def _check_muon(config: Any) -> Iterator[Problem]:
    """Report settings with which Muon does not work: split matrices, or no trained matrices."""
    yield from _needs(config, "muon", "whole matrices on the device", ("tensor_parallel", "cpu_offload"))
    if config.lora is not None:
        text = "muon trains the matrices of layers, and trainer.lora freezes them; use adamw"
        yield Problem(("trainer", "optimizer"), f"trainer.optimizer: {text}", (("trainer", "lora"),))


def _check_adamw8bit(config: Any) -> Iterator[Problem]:
    yield from _needs(config, "adamw8bit", "whole rows", ("tensor_parallel",))


def _check_adafactor(config: Any) -> Iterator[Problem]:
    keys = ("tensor_parallel", "expert_parallel", "cpu_offload")
    yield from _needs(config, "adafactor", "whole rows and all experts of a layer on the device", keys)


def _needs(config: Any, name: str, what: str, without: tuple[str, ...]) -> Iterator[Problem]:
    """Report keys of the section that an optimizer does not support."""
    own = config.trainer.section(FSDP2Config)
    for key in without:
        if getattr(own, key) != FSDP2Config.model_fields[key].default:
            text = f"{name} needs {what}, without trainer.fsdp2.{key}; use adamw"
            yield Problem(("trainer", "optimizer"), f"trainer.optimizer: {text}", ((*AT, key),))


BLOCK, MIN_NUMBERS = 256, 4096
"""Numbers per scale in bitsandbytes, and size of the smallest matrix that has 8-bit moments. Matrices whose rows are
shorter than a block have none."""
OPTIMIZERS = {
    "muon": Spec(
        about="Muon for the matrices of layers, AdamW for the rest.",
        make="hpcrl.engines.train.fsdp2.muon:Muon",
        check=_check_muon,
    ),
    "adamw8bit": Spec(
        about="AdamW with moments in 8 bits for the matrices of layers, AdamW for the rest.",
        make="hpcrl.engines.train.fsdp2.adamw8bit:AdamW8bit",
        needs={"bitsandbytes": "bitsandbytes"},
        tested_versions={"bitsandbytes": "0.50"},
        check=_check_adamw8bit,
    ),
    "adafactor": Spec(
        about="Adafactor for the matrices of layers, AdamW for the rest.",
        make="hpcrl.engines.train.fsdp2.adafactor:Adafactor",
        check=_check_adafactor,
    ),
}

SPEC = TrainEngineSpec(
    about="PyTorch FSDP2, for any decoder of transformers.",
    make="hpcrl.engines.train.fsdp2.engine:make",
    section=FSDP2Config,
    division=divide,
    media=frozenset({IMAGE}),
    check=_check,
    resume_keys=(
        "attention",
        "activation_checkpointing",
        "cpu_offload",
        *SPLITS,
    ),
    plan="hpcrl.engines.train.fsdp2.memory:PLAN",
    unsupported=lacking,
    unsharded=is_unsharded,
    segments=True,
    computes=frozenset({"entropy", "divergence"}),
    teaches=frozenset({"sampled", "top_k", "full"}),
    deterministic=True,
    optimizers=ADAMW | OPTIMIZERS,
    float32_head=True,
    exchanges_state=True,
    exchanges_adapters=True,
    freezes=True,
    lora=True,
    adapts_critic=True,
    make_critic="hpcrl.engines.train.fsdp2.critic:make",
    router_replay=True,
    policy_keys=(*ROUTER_KEYS, "mtp_loss"),
    trains_mtp=True,
)
