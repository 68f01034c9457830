"""Images in a rank's memory: their tokens in a row, the vision tower's activations, and pixels in host memory.

The sums follow transformers' towers operation by operation, as in hpcrl.planner.activations. A tower computes a
micro-batch's images in one call before the decoder, so its activations are kept together with the decoder's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hpcrl.cluster.layout import ENGINE_ROLES, RoleLayout
from hpcrl.config import Config, RoleName
from hpcrl.messaging.nonblocking_sender import MAX_UNSENT_BYTES
from hpcrl.models.families import largest_image
from hpcrl.models.shape import ModelShape
from hpcrl.models.tower import Tower
from hpcrl.planner.memory_parts import Part, samples_of_a_step
from hpcrl.spec.media import MAX_PIXEL_BYTES
from hpcrl.spec.tables import REWARDS

FP32 = 4
INDEX = 8


def image_tokens_of_row(config: Config, tower: Tower | None) -> int:
    """Tokens of a row's images at most: as counted where the rows are known; else one image of the largest size per
    prompt and, in an environment, per turn."""
    if tower is None:
        return 0
    if tower.row_tokens is not None:
        return tower.row_tokens
    return min(config.max_turns * image_limit(config, tower), config.max_row_tokens)


def with_row_tokens(shape: ModelShape, row_tokens: int | None) -> ModelShape:
    """The shape with the number of image tokens that the rows have at most; None if they are not known."""
    return replace(shape, tower=replace(shape.tower, row_tokens=row_tokens)) if shape.tower is not None else shape


def image_limit(config: Config, tower: Tower) -> int:
    """Tokens of an image at most, in a prompt."""
    return min(config.data.max_prompt_tokens, largest_image_tokens(config, tower))


def largest_image_tokens(config: Config, tower: Tower) -> int:
    """Tokens of an image of maximum size, which a prompt may not hold; of one in a prompt if no maximum is known."""
    path = Path(config.model.path) if config.model.path is not None else None
    limits = [limit for limit in (config.data.max_pixels, largest_image(path)) if limit is not None]
    tokens = [max(1, limit // (tower.patches * tower.patch_size**2)) for limit in limits]
    return min(tokens, default=config.data.max_prompt_tokens)


def tower_activations(tower: Tower | None, num_tokens: int, num_bytes: int, checkpointing: bool) -> int:
    """Bytes kept for the backward pass of images with this many tokens. With activation checkpointing, each block keeps
    only its input."""
    if tower is None:
        return 0
    outside, of_block = _outside(tower, num_bytes), kept_of_block(tower, num_tokens, num_bytes, checkpointing)
    # The first merger's input is the last block's output; the other mergers read inputs of blocks.
    outside += _norm(tower, num_bytes) + 3 * tower.hidden_size * num_bytes
    return num_tokens * tower.patches * outside + tower.depth * of_block


def _outside(tower: Tower, num_bytes: int) -> int:
    """Bytes per patch that are kept outside the blocks and the first merger."""
    hidden, others = tower.hidden_size, tower.num_mergers - 1
    outside = tower.patch_values * num_bytes
    outside += 2 * hidden // tower.num_heads * FP32  # cosines and sines
    outside += 4 * (INDEX + FP32) * (tower.num_positions > 0)  # four positions per patch, and their shares
    return outside + others * (_norm(tower, num_bytes) + 2 * hidden * num_bytes)


def kept_of_block(tower: Tower, num_tokens: int, num_bytes: int, checkpointing: bool) -> int:
    """Bytes that a block keeps for its backward pass."""
    of_patch = tower.hidden_size * num_bytes if checkpointing else _block(tower, num_bytes)
    return num_tokens * tower.patches * of_patch


def kept_of_ends(tower: Tower, num_tokens: int, num_bytes: int) -> int:
    """Bytes that are kept outside the blocks while these compute their backward pass: all but the first merger's; and
    the gradients of the features that the other mergers make."""
    of_features = (tower.num_mergers - 1) * tower.out_size * num_bytes
    return num_tokens * (tower.patches * _outside(tower, num_bytes) + of_features)


def patch_bytes(tower: Tower | None, num_tokens: int, num_bytes: int) -> int:
    """Bytes of the tower's input in fp32, which a step holds beside its copy in another compute dtype."""
    return num_tokens * tower.patches * tower.patch_values * FP32 * (num_bytes < FP32) if tower is not None else 0


def recomputed_block(tower: Tower, num_tokens: int, num_bytes: int) -> int:
    """Bytes that a block saves beyond its input. The input is also the first norm's, except that RMSNorm converts it to
    fp32."""
    shared = tower.hidden_size * num_bytes if num_bytes == FP32 or not tower.gated else 0
    return num_tokens * tower.patches * (_block(tower, num_bytes) - shared)


def flowing_in_block(tower: Tower, num_tokens: int, num_bytes: int) -> int:
    """Bytes of the gradients in a block's backward pass: of its result, and of the feed-forward layer's tensors, or of
    attention's, where queries and keys are rotated in fp32 and the feed-forward layer's tensors are freed."""
    hidden, inner = tower.hidden_size, tower.intermediate_size
    fed = (2 if tower.gated else 1) * inner * num_bytes
    freed = _norm(tower, num_bytes) + (hidden + (4 if tower.gated else 2) * inner) * num_bytes
    attended = 4 * hidden * (num_bytes + FP32) - freed
    return num_tokens * tower.patches * (hidden * num_bytes + max(fed, attended))


def convolution_bytes(tower: Tower, num_tokens: int, num_bytes: int) -> int:
    """Bytes of the patches' convolution in its backward pass on CPUs: in bf16 the kernel (oneDNN, as measured) pads
    three channels to 16, and has the matrix and its gradient in fp32, up to 18 further rows, and copies of its input
    and result."""
    if num_bytes == FP32:
        return 0
    row = 16 * tower.frames * tower.patch_size**2 * FP32
    copied = num_tokens * tower.patches * (2 * tower.patch_values + tower.hidden_size) * num_bytes
    return (2 * tower.hidden_size + 18) * row + tower.hidden_size * tower.patch_values * num_bytes + copied


def tower_forward(tower: Tower | None, num_tokens: int, num_bytes: int) -> int:
    """Peak bytes of a forward pass of which nothing is kept: the patches, and learned positions, four of which are
    mixed per patch, or a block's attention, with queries and keys rotated in fp32, or its feed-forward layer."""
    if tower is None:
        return 0
    hidden = tower.hidden_size
    convolved = tower.patch_values * num_bytes * (num_bytes < FP32) + hidden * num_bytes
    placed = 13 * hidden * num_bytes * (tower.num_positions > 0)
    rotation = 2 * hidden // tower.num_heads * FP32
    attended = rotation + 6 * hidden * num_bytes + 4 * hidden * FP32
    fed = rotation + 2 * hidden * num_bytes + (3 if tower.gated else 2) * tower.intermediate_size * num_bytes
    return num_tokens * tower.patches * (tower.patch_values * FP32 + max(convolved, placed, attended, fed))


def feature_bytes(tower: Tower | None, num_tokens: int, num_bytes: int) -> int:
    """Bytes of the features of images with this many tokens."""
    return num_tokens * tower.num_mergers * tower.out_size * num_bytes if tower is not None else 0


def _norm(tower: Tower, num_bytes: int) -> int:
    """Bytes per patch: RMSNorm's input in fp32, its result and scale; LayerNorm's input, mean and scale."""
    hidden = tower.hidden_size
    return hidden * (FP32 + num_bytes) + FP32 if tower.gated else hidden * num_bytes + 2 * FP32


def _block(tower: Tower, num_bytes: int) -> int:
    """Bytes per patch. Values are a view into the joint result for queries, keys and values, of which queries and keys
    are rotated copies; the results of separate images are joined in a further copy."""
    hidden, inner = tower.hidden_size, tower.intermediate_size
    kept = 2 * _norm(tower, num_bytes)
    kept += 2 * hidden * num_bytes  # input of attention and of the feed-forward layer
    kept += (3 + 2 + 2) * hidden * num_bytes + FP32 * tower.num_heads
    return kept + (4 if tower.gated else 2) * inner * num_bytes


def pixel_parts(config: Config, layout: RoleLayout, shape: ModelShape, role: RoleName) -> Iterator[Part]:
    """Host memory of a rank for the pixels of a step's images, in one of its roles. Rows of a prompt share its pixels;
    an environment's observations differ. Ranks with a training engine hold them twice while a batch is assembled;
    roles with equal ranks have one batch."""
    row, samples = _row_pixels(config, shape), samples_of_a_step(config)
    different = samples if config.envs or not config.learns_from_rewards else config.rollout.num_prompts
    if role in ENGINE_ROLES and config.learns:
        before = ENGINE_ROLES[: ENGINE_ROLES.index(role)]
        if all(layout.ranks[other] != layout.ranks[role] for other in before):
            rows = -(-samples // len(layout.division(role).groups))
            yield Part(role, "pixels", 2 * min(rows, different) * row, on_host=True)
    if role == "generator" and layout.replicas:
        rows = -(-samples // len(layout.replicas))
        yield Part("generator", "pixels", min(rows, different) * row, on_host=True)


def controller_pixels(config: Config, layout: RoleLayout, shape: ModelShape) -> int:
    """Host memory of the controller for the pixels of the prompts of a step, and of evaluation, and for copies that
    wait to be sent: to every rank of a replica the replica's prompts, up to the limit and one prompt beyond."""
    rollout, row = config.rollout, _row_pixels(config, shape)
    prompts, responses = (n * config.evaluates for n in (config.eval.most_prompts, config.eval.most_responses))
    if config.generates:
        prompts += rollout.num_prompts + rollout.extra_prompts
        responses += (rollout.num_prompts + rollout.extra_prompts) * (rollout.group_size + rollout.extra_members)
    of_rank = min(prompts, -(-responses // max(1, len(layout.replicas)))) * row
    return prompts * row + sum(map(len, layout.replicas)) * min(of_rank, MAX_UNSENT_BYTES + row)


def scorer_pixels(config: Config, layout: RoleLayout, shape: ModelShape) -> int:
    """Host memory of a reward rank for the pixels of a step's prompts, if a reward gets images: responses of a prompt
    share them until they are scored. A response that a worker process scores has two further copies, encoded and
    decoded."""
    judge_sees = bool(config.asks("judge"))
    shown = [each for each in config.reward.values() if REWARDS[each.name].shown_images(each.options, judge_sees)]
    if not (shown and config.generates and layout.ranks.get("reward")) or config.debug == "fake":
        return 0
    prompts = config.rollout.num_prompts + config.rollout.extra_prompts
    samples = prompts * config.rollout.group_size
    waiting = -(-prompts // len(layout.ranks["reward"]))
    at_work = min(samples, sum(each.num_processes * each.concurrency for each in shown))
    return (waiting + 2 * at_work) * min(_row_pixels(config, shape), MAX_PIXEL_BYTES)


def _row_pixels(config: Config, shape: ModelShape) -> int:
    """Bytes of a row's pixels; prompts and observations with more than MAX_PIXEL_BYTES are refused."""
    tokens = image_tokens_of_row(config, shape.tower)
    pixels = tokens * shape.tower.pixel_bytes if shape.tower is not None else 0
    return min(pixels, config.max_turns * MAX_PIXEL_BYTES)
