"""Trained MTP layers (model.mtp=train): their parameters, and the moments of a micro-batch that they add.

In files and in memory they are like the decoder's last layer with attention and, in a mixture, experts. Their forward
pass follows the policy's, so their backward pass is the first of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hpcrl.config import Config
from hpcrl.models.families import family_of
from hpcrl.models.shape import MTP_PREFIX, ROUTER_BIAS, CannotPlanError, ModelShape, Parameter, Unit
from hpcrl.planner.activations import (
    FP32,
    INDEX,
    Tokens,
    computing_bytes,
    flows,
    forward_logits_bytes,
    layer_bytes,
    norm_bytes,
    own_input_bytes,
    positions_bytes,
    recomputed_flows,
)
from hpcrl.planner.memory_parts import BYTES, has_gpus
from hpcrl.planner.moments import FIELD_BYTES, NORM_GRADIENTS, Moment


def num_trained(config: Config, shape: ModelShape) -> int:
    """The number of MTP layers that the trainer trains."""
    return shape.mtp_layers if config.learns and config.model.mtp == "train" else 0


def _like(shape: ModelShape) -> int:
    """The decoder layer that MTP layers are like. CannotPlanError if there is none."""
    attends = {p.layer for p in shape.parameters if p.layer is not None and ".self_attn." in p.name}
    alike = attends & set(shape.expert_layers) if shape.expert_layers else attends
    if not alike:
        raise CannotPlanError(f"{shape.family}: no layer has the attention and the experts of the MTP layers")
    return max(alike)


def with_mtp(config: Config, shape: ModelShape) -> ModelShape:
    """The shape with the trained MTP layers' parameters added, as layers after the last and, outside the layers, what
    is before and after them."""
    count, hidden = num_trained(config, shape), shape.hidden_size
    if not count:
        return shape
    like, added = _like(shape), list[Parameter]()
    for number in range(count):
        for parameter in shape.of_layer(like):
            if parameter.name.endswith(ROUTER_BIAS):  # which is no parameter, and stays
                continue
            inside = parameter.name.partition(f".{like}.")[2]
            name = f"{MTP_PREFIX}layers.{number}.{inside}"
            added.append(replace(parameter, name=name, layer=shape.num_layers + number))
    for number in range(shape.mtp_joins):
        at = f"{MTP_PREFIX}joins.{number}."
        added += [Parameter(f"{at}{name}.weight", (hidden,), "whole") for name in ("enorm", "hnorm", "norm")]
        added.append(Parameter(f"{at}eh_proj.weight", (hidden, 2 * hidden), "whole"))
    return replace(shape, parameters=(*shape.parameters, *added))


def mtp_moments(
    config: Config, shape: ModelShape, tokens: Tokens, checkpointing: bool, policy: int
) -> Iterator[Moment]:
    """The moments of the layers' forward and backward pass, after the policy's forward pass, which keeps `policy`
    bytes. `shape` is the policy's."""
    count, trainer, gpu = num_trained(config, shape), config.trainer, has_gpus(config, ("trainer",))
    if not count:
        return
    num_bytes, like = BYTES[trainer.param_dtype], _like(shape)
    given = [_of_layer(tokens, number) for number in range(1, count + 1)]
    hidden = [own.total * shape.hidden_size for own in given]
    whole = [layer_bytes(shape, like, own, num_bytes, gpu) for own in given]
    kept = [numbers * num_bytes for numbers in hidden] if checkpointing else whole
    before = [_before_layer(shape, own, num_bytes, number, gpu) for number, own in enumerate(given)]
    after = [own.total * _norm(shape, num_bytes) for own in given]
    predicted = sum(own.predicted for own in given)
    states = predicted * shape.hidden_size * num_bytes
    everything = policy + sum(map(sum, zip(kept, before, after, strict=True))) + states + predicted * (INDEX + 2 * FP32)
    sizes = (shape, tokens, trainer.logits_chunk_tokens, num_bytes, bool(trainer.head_dtype))
    # In the forward pass, the policy's states are held too; in the head's backward pass, gradients of its states.
    beside = max(tokens.total * shape.hidden_size * num_bytes, states)
    yield Moment(None, "forward", {"activations": everything + beside, "logits": forward_logits_bytes(*sizes)})
    left = everything - predicted * (INDEX + 2 * FP32)  # of the head's states, only the gradients are left
    for number in reversed(range(count)):
        left -= 0 if number else states
        unit: Unit = ("layer", shape.num_layers + number)
        normalising = {"activations": left + NORM_GRADIENTS * FP32 * hidden[number]}
        yield Moment(unit, "backward", normalising, complete=0.0, adding=0.0)
        left -= after[number]
        of_layer = (shape, like, given[number], num_bytes, gpu)
        own_input, computing = own_input_bytes(*of_layer), computing_bytes(*of_layer)
        below = left - (own_input if checkpointing else whole[number])
        if checkpointing:
            recomputed = own_input + computing + hidden[number] * num_bytes
            yield Moment(unit, "backward", {"activations": below + recomputed}, complete=0.0, adding=0.0)
        for flow in recomputed_flows(*of_layer) if checkpointing else flows(*of_layer):
            yield Moment(unit, "backward", {"activations": below + flow.num_bytes}, flow.complete, flow.adding)
        left -= kept[number] + before[number]
        yield Moment(unit, "end", {"activations": left + before[number]})


def _of_layer(tokens: Tokens, number: int) -> Tokens:
    """What a layer computes, counted from 1: it has no pair for that many tokens of each row."""
    rows = number * (tokens.total // tokens.longest)
    return replace(tokens, total=max(1, tokens.total - rows), predicted=max(1, tokens.predicted - rows))


def _before_layer(shape: ModelShape, tokens: Tokens, num_bytes: int, number: int, gpu: bool) -> int:
    """Bytes kept before a layer, counted from 0: normalised embeddings and states, both joined, positions and fields.
    Embeddings, and the policy's states, have no gradient."""
    size = shape.hidden_size
    inputs = size * FP32 * (1 if number else 2)  # which the norms keep for a gradient
    normalised = 2 * _norm(shape, num_bytes) - inputs
    positions = positions_bytes(shape, tokens, num_bytes, gpu)
    return tokens.total * (normalised + 2 * size * num_bytes + FIELD_BYTES) + positions


def _norm(shape: ModelShape, num_bytes: int) -> int:
    """Bytes of a token that a norm keeps; centred norms compute in fp32."""
    decoder = family_of(shape.family).unlisted
    in_float32 = decoder is not None and decoder.centred_norms
    return norm_bytes(shape, shape.hidden_size, FP32 if in_float32 else num_bytes)
