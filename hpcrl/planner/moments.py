"""Moments of a micro-batch at which a trainer's memory may peak.

The backward pass frees activations while it creates gradients, so no moment has all of both: the head's backward pass
has the logits and all activations; a layer's has gradients of its activations, and the layer's recomputed activations;
after a layer, its activations are freed and its parameters' gradients are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from hpcrl.config import Config
from hpcrl.models.shape import ModelShape, Unit
from hpcrl.planner.activations import (
    FP32,
    INDEX,
    Tokens,
    computing_bytes,
    flows,
    forward_logits_bytes,
    fsdp2_activations,
    layer_bytes,
    logits_bytes,
    own_input_bytes,
    positions_bytes,
    recomputed_flows,
    recomputed_scores,
)
from hpcrl.planner.image_memory import (
    convolution_bytes,
    flowing_in_block,
    kept_of_block,
    kept_of_ends,
    patch_bytes,
    recomputed_block,
    tower_activations,
)
from hpcrl.planner.memory_parts import BYTES, Part, has_gpus
from hpcrl.planner.taught_memory import divergence_bytes

FIELD_BYTES = 12 * INDEX
"""Bytes per token of ids, positions, indices of packed tokens, and the objective's fields."""

NORM_GRADIENTS = 5
"""Tensors in fp32, as large as its input, in the backward pass of transformers' RMSNorm, at the square's gradient."""


@dataclass(frozen=True)
class Moment:
    """Bytes of activations, by part, at a moment of a micro-batch.

    Args:
        unit: The layer or block of the backward pass; None in the forward pass, and for norm and head.
        at: "end" if the unit has just finished its backward pass, "reduced" if also its gradients are reduced;
            "embedding" if the embedding, or a larger one beside it, has just got its gradient.
        complete: In a unit's backward pass, the share of its parameters' gradients that is complete.
        adding: The share that exists beside them before it is added to sums; None: the largest parameter's.
    """

    unit: Unit | None
    at: Literal["forward", "backward", "end", "reduced", "embedding"]
    parts: dict[str, int] = field(default_factory=dict)
    complete: float = 1.0
    adding: float | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def as_parts(self) -> list[Part]:
        """The trainer's parts."""
        return [Part("trainer", name, size, ("train",)) for name, size in self.parts.items()]


@dataclass(frozen=True)
class Beside:
    """Bytes of activations that only some ranks have: of a layer that keeps them, and outside the layers."""

    layer: int = 0
    outside: int = 0


def moments(
    config: Config, shape: ModelShape, tokens: Tokens, checkpointing: bool, beside: Beside | None = None
) -> Iterator[Moment]:
    """The moments of a micro-batch with these tokens, in order; those of MTP layers are in mtp_memory.py. `shape` has
    the rank's parameters; a critic's has no logits."""
    trainer, beside = config.trainer, beside or Beside()
    num_bytes, tower, images = BYTES[trainer.param_dtype], shape.tower, tokens.of_images
    gpu = has_gpus(config, ("trainer",))
    hidden = tokens.total * shape.hidden_size
    outside = tokens.total * FIELD_BYTES + beside.outside
    everything = fsdp2_activations(shape, tokens, num_bytes, checkpointing, gpu) + outside
    everything += 0 if checkpointing else shape.num_layers * beside.layer
    logits = [0, 0]
    if not any(parameter.name.startswith("score.") for parameter in shape.parameters):
        sizes = (shape, tokens, trainer.logits_chunk_tokens, num_bytes, bool(trainer.head_dtype))
        forward, backward = divergence_bytes(config, shape, tokens, num_bytes)
        logits = [forward_logits_bytes(*sizes) + forward, logits_bytes(*sizes, gpu=gpu) + backward]
    beside_patches = {"activations": everything, "patches": patch_bytes(tower, images, num_bytes)}
    normalised = hidden * (FP32 + 3 * num_bytes)  # in the final norm, beside what it keeps
    yield Moment(None, "forward", beside_patches | {"activations": everything + normalised})
    yield Moment(None, "forward", beside_patches | {"logits": logits[0]})
    yield Moment(None, "backward", {"activations": everything, "logits": logits[1]})
    # The final norm has five gradients in fp32; the head's states are freed, and its matrix has a gradient.
    normalising = NORM_GRADIENTS * FP32 * hidden - tokens.predicted * shape.hidden_size * num_bytes
    head = shape.vocab_size * shape.hidden_size * num_bytes if logits[1] else 0
    yield Moment(None, "backward", {"activations": everything + normalising, "logits": head})

    scores = {"recomputed scores": recomputed_scores(shape, tokens)}
    whole = [layer_bytes(shape, layer, tokens, num_bytes, gpu) + beside.layer for layer in range(shape.num_layers)]
    kept = [hidden * num_bytes] * shape.num_layers if checkpointing else whole
    outside += positions_bytes(shape, tokens, num_bytes, gpu)
    outside += tower_activations(tower, images, num_bytes, checkpointing)
    left = outside + sum(kept)
    for layer in reversed(range(shape.num_layers)):
        unit: Unit = ("layer", layer)
        of_layer = (shape, layer, tokens, num_bytes, gpu)
        own_input, computing = own_input_bytes(*of_layer), computing_bytes(*of_layer)
        below = left - (own_input if checkpointing else whole[layer])  # for a moment without the layer
        # Beside them in a forward pass: the layer's input, or in a recomputation its result's gradient.
        first = {"activations": below + own_input, "recomputed layer": computing + hidden * num_bytes}
        if checkpointing:
            yield Moment(unit, "backward", first, complete=0.0, adding=0.0)
        else:
            yield Moment(None, "forward", {"activations": below + computing + hidden * num_bytes})
        for flow in recomputed_flows(*of_layer) if checkpointing else flows(*of_layer):
            parts = {"activations": below, "recomputed layer": flow.num_bytes + beside.layer}
            if not checkpointing:
                parts = {"activations": sum(parts.values())}
            yield Moment(unit, "backward", parts | scores, flow.complete, flow.adding)
        left -= kept[layer]
        yield Moment(unit, "end", {"activations": left + hidden * num_bytes})
    if tower is None:
        yield Moment(None, "embedding", {"activations": outside + hidden * num_bytes})
        return
    of_block = kept_of_block(tower, images, num_bytes, checkpointing)
    recomputed, flowing = recomputed_block(tower, images, num_bytes), flowing_in_block(tower, images, num_bytes)
    outside -= tower_activations(tower, images, num_bytes, checkpointing)
    left = kept_of_ends(tower, images, num_bytes) + tower.depth * of_block + outside
    for block in reversed(range(tower.depth)):
        yield Moment(("block", block), "backward", _computing(left, recomputed, flowing, checkpointing))
        left -= of_block
        ended = {"activations": left + images * tower.patches * tower.hidden_size * num_bytes}
        yield Moment(("block", block), "end", ended)
    if not gpu:
        convolved = {"patches": convolution_bytes(tower, images, num_bytes)}
        yield Moment(("block", 0), "reduced", {"activations": outside, **convolved})


def _computing(kept: int, recomputed: int, flowing: int, checkpointing: bool) -> dict[str, int]:
    if checkpointing:
        return {"activations": kept, "recomputed layer": recomputed + flowing}
    return {"activations": kept + flowing}


def fullest(found: Iterator[Moment], others: Callable[[Moment], dict[str, int]] | None = None) -> list[Part]:
    """The parts at the moment with the most bytes. `others` gives further parts at a moment."""
    all_parts = (replace(each, parts=each.parts | (others(each) if others else {})) for each in found)
    return max(all_parts, key=lambda moment: moment.num_bytes).as_parts()
