"""Split a model over ranks, and check the split: layers over stages, heads and experts over ranks.

The rules are Megatron-Core 0.16's (parallel_state, transformer_config and the interleaved schedule). They are checked
before a job is submitted; Megatron-Core would fail with an assertion on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, Problem
from hpcrl.engines.train.megatron.spec import COUNTED, MegatronConfig, indivisible, problem
from hpcrl.engines.train.router_keys import without_routers
from hpcrl.models.delta import DeltaSizes, delta_sizes
from hpcrl.models.shape import ModelShape
from hpcrl.planner.memory_parts import samples_of_an_update

VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this on each tensor parallel rank."""

StageLayers = tuple[tuple[int, ...], ...]
"""The layers of a stage, chunk by chunk."""


@dataclass(frozen=True)
class Degrees:
    """A Megatron trainer's degrees of data parallelism."""

    data: int
    """Number of copies of the model. The ranks of a copy split tensors, stages and sequences."""
    expert_data: int
    """Number of copies of each expert."""
    optimizer: int
    """Number of ranks over which the optimizer state of all parameters except experts is sharded: data parallel x
    context parallel."""

    @classmethod
    def of(cls, megatron: MegatronConfig, num_ranks: int) -> Degrees:
        """The degrees on num_ranks ranks. ValueError if num_ranks is not a multiple of the sizes."""
        copy, experts = megatron.ranks_of_a_copy, megatron.ranks_of_all_experts
        if num_ranks % copy or num_ranks % experts:
            raise ValueError(f"{num_ranks} ranks are not a multiple of {copy} and {experts}")
        return cls(num_ranks // copy, num_ranks // experts, num_ranks // copy * megatron.context_parallel)


def padded_vocabulary(vocab_size: int, megatron: MegatronConfig) -> int:
    """Number of rows of the padded embedding."""
    multiple = VOCABULARY_MULTIPLE * megatron.tensor_parallel
    return -(-vocab_size // multiple) * multiple


def split_layers(num_layers: int, megatron: MegatronConfig) -> list[StageLayers] | None:
    """The layers of every stage; None if they cannot be split as configured. In the model, chunk c of stage s has the
    number c x stages + s."""
    stages, chunks = megatron.pipeline_parallel, megatron.virtual_pipeline
    counts = (_with_given_ends if megatron.layers_of_ends else _evenly)(num_layers, megatron)
    if not counts:
        return None
    spans = [tuple(range(start, end)) for start, end in pairwise(accumulate(counts, initial=0))]
    return [tuple(spans[chunk * stages + stage] for chunk in range(chunks)) for stage in range(stages)]


def _evenly(num_layers: int, megatron: MegatronConfig) -> list[int]:
    """Number of layers of each chunk in the model's order; empty if the layers do not divide. An embedding or loss that
    counts as a layer replaces a layer in the first or last chunk."""
    first, last = (int(getattr(megatron, key)) for key in COUNTED)
    places = megatron.pipeline_parallel * megatron.virtual_pipeline
    size, rest = divmod(num_layers + first + last, places)
    if rest or size < max(first, last):
        return []
    counts = [size] * places
    counts[0] -= first
    counts[-1] -= last
    return counts


def _with_given_ends(num_layers: int, megatron: MegatronConfig) -> list[int]:
    """As _evenly(), if the number of the first or last stage's layers is given. The other stages get equal numbers."""
    stages, chunks = megatron.pipeline_parallel, megatron.virtual_pipeline
    first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    between = stages - len(megatron.layers_of_ends)
    left = num_layers - sum(megatron.layers_of_ends.values())
    size, rest = divmod(left, between) if between else (0, left)
    if rest or size < bool(between):
        return []
    of_stages = [size] * stages
    of_stages[0], of_stages[-1] = first or size, last or size
    return [] if any(count % chunks for count in of_stages) else [count // chunks for count in of_stages] * chunks


def check_split(config: Config, layout: RoleLayout, shape: ModelShape) -> list[Problem]:
    """Problems between the trainer's parallel sizes and the model or the ranks."""
    megatron, ranks = own(config), len(layout.ranks["trainer"])
    # The layout refuses sizes that do not divide, unless debug=fake replaces the engine.
    problems = [*indivisible(megatron, ranks), *_tensors(megatron, shape), *_experts(megatron, shape)]
    problems += _stages(megatron, shape)
    return problems or list(_samples(config, Degrees.of(megatron, ranks)))


def own(config: Config) -> MegatronConfig:
    """The section trainer.megatron."""
    return config.trainer.section(MegatronConfig)


def _tensors(megatron: MegatronConfig, shape: ModelShape) -> Iterator[Problem]:
    tensor = megatron.tensor_parallel
    if shape.num_heads % tensor:
        yield problem("tensor_parallel", f"{tensor} does not divide the {shape.num_heads} attention heads")
    if shape.num_kv_heads % tensor and tensor % shape.num_kv_heads:
        text = f"{tensor} neither divides the {shape.num_kv_heads} key and value heads nor is a multiple of them"
        yield problem("tensor_parallel", text)
    if (sizes := delta_sizes(shape)) is not None:
        yield from _heads_of_delta_rule(megatron, shape, sizes)
    if len(shape.expert_layers) < shape.num_layers and shape.intermediate_size % tensor:
        yield problem("tensor_parallel", f"{tensor} does not divide intermediate_size, {shape.intermediate_size}")
    if megatron.sequence_parallel and tensor == 1:
        text = "true shares activations over the tensor parallel ranks, and tensor_parallel is 1; set it to false"
        yield problem("sequence_parallel", text, "tensor_parallel")
    if not megatron.sequence_parallel and tensor > 1 and shape.num_experts:
        text = f"a mixture of experts trains with tensor_parallel={tensor} only with sequence_parallel=true"
        yield problem("sequence_parallel", text, "tensor_parallel")


def _heads_of_delta_rule(megatron: MegatronConfig, shape: ModelShape, sizes: DeltaSizes) -> Iterator[Problem]:
    """Megatron-Core's gates of attention are not divided as its query heads if ranks share a key head."""
    tensor, context = megatron.tensor_parallel, megatron.context_parallel
    if sizes.key_heads % tensor:
        yield problem("tensor_parallel", f"{tensor} does not divide the {sizes.key_heads} key heads of the delta rule")
    if tensor > shape.num_kv_heads:
        text = f"{tensor} is above the {shape.num_kv_heads} key and value heads of the gated attention"
        yield problem("tensor_parallel", text)
    if context > 1:
        text = f"{context}, but a state of {shape.family} passes from token to token; use 1, or trainer.engine=fsdp2"
        yield problem("context_parallel", text)


def _experts(megatron: MegatronConfig, shape: ModelShape) -> Iterator[Problem]:
    yield from without_routers(megatron, shape, problem)
    expert, within = megatron.expert_parallel, megatron.expert_tensor_parallel
    if not shape.num_experts:
        for key, value in (("expert_parallel", expert), ("expert_tensor_parallel", within)):
            if value > 1:
                yield problem(key, f"{value}, but {shape.family} has no experts; use 1")
        return
    if shape.num_experts % expert:
        yield problem("expert_parallel", f"{expert} does not divide the {shape.num_experts} experts of a layer")
    if shape.expert_size % within:
        yield problem("expert_tensor_parallel", f"{within} does not divide the experts' width {shape.expert_size}")
    elif within > 1 and any(p.split == "expert" and p.name.endswith("bias") for p in shape.parameters):
        yield problem("expert_tensor_parallel", f"{within}, but the experts of {shape.family} have biases; use 1")
    if shape.shared_size % megatron.tensor_parallel:
        text = f"{megatron.tensor_parallel} does not divide the shared experts' width {shape.shared_size}"
        yield problem("tensor_parallel", text)


def _stages(megatron: MegatronConfig, shape: ModelShape) -> Iterator[Problem]:
    stages, chunks = megatron.pipeline_parallel, megatron.virtual_pipeline
    if chunks > 1 and stages == 1:
        yield problem("virtual_pipeline", f"{chunks} chunks need pipeline_parallel above 1", "pipeline_parallel")
        return
    if split_layers(shape.num_layers, megatron) is not None:
        return
    if given := megatron.layers_of_ends:
        key, between = next(iter(given)), stages - len(given)
        shown = " and ".join(f"{end}={count}" for end, count in given.items())
        text = f"{shape.num_layers} layers with {shown} do not divide over {between} other stages, {chunks} chunks each"
        yield problem(key, f"{text}; {_other_end(shape.num_layers, megatron, key)}", *given, "pipeline_parallel")
        return
    counted = sum(getattr(megatron, key) for key in COUNTED)
    total, places = shape.num_layers + counted, stages * chunks
    what = f"{shape.num_layers} layers" + (f" + {counted} for embedding and loss = {total}" if counted else "")
    text = f"{what} do not divide over {stages} stages x {chunks} chunks = {places}"
    yield problem("pipeline_parallel", f"{text}; {_remedy(shape.num_layers, megatron)}", "virtual_pipeline", *COUNTED)


def _other_end(num_layers: int, megatron: MegatronConfig, key: str) -> str:
    """A solution for `key`, one of layers_of_ends: the nearest number of layers that divides."""
    possible = [
        count
        for count in range(1, num_layers)
        if split_layers(num_layers, megatron.model_copy(update={key: count})) is not None
    ]
    if not possible:
        return "choose another pipeline_parallel or virtual_pipeline"
    return f"{key}={min(possible, key=lambda count: abs(count - megatron.layers_of_ends[key]))} divides"


def _remedy(num_layers: int, megatron: MegatronConfig) -> str:
    """A solution: another way to count embedding and loss, else the nearest number of chunks. Counting only the loss
    is not tried: it divides exactly where counting only the embedding does."""
    for values in ((True, True), (True, False), (False, False)):
        counted = dict(zip(COUNTED, values, strict=True))
        if split_layers(num_layers, megatron.model_copy(update=counted)) is not None:
            return " ".join(f"{key}={str(value).lower()}" for key, value in counted.items()) + " divides"
    possible = [
        chunks
        for chunks in range(1, num_layers + 1)
        if split_layers(num_layers, megatron.model_copy(update={"virtual_pipeline": chunks})) is not None
    ]
    if not possible:
        return "choose another pipeline_parallel"
    return f"virtual_pipeline={min(possible, key=lambda chunks: abs(chunks - megatron.virtual_pipeline))} divides"


def _samples(config: Config, degrees: Degrees) -> Iterator[Problem]:
    megatron, samples = own(config), samples_of_an_update(config)
    if samples < degrees.data:
        text = f"an optimizer step has {samples} samples, fewer than the {degrees.data} data parallel ranks"
        yield problem("tensor_parallel", f"{text}; raise rollout.num_prompts or use fewer trainer ranks")
    elif megatron.virtual_pipeline > 1 and samples // degrees.data < megatron.pipeline_parallel:
        text = (
            f"{megatron.virtual_pipeline} chunks run micro-batches in groups of pipeline_parallel = "
            f"{megatron.pipeline_parallel}, and {samples} samples of an optimizer step over {degrees.data} data "
            f"parallel ranks make at most {samples // degrees.data}; use virtual_pipeline=1 or larger batches"
        )
        yield problem("virtual_pipeline", text, "pipeline_parallel")
