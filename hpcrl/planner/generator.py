"""Memory of a generator rank: its share of the weights, the KV cache, logits, and buffers for new weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from hpcrl.cluster.layout import RoleLayout
from hpcrl.comm.weight_plan import BUCKET_BYTES, ITEM_BYTES
from hpcrl.config import Config, RoleName
from hpcrl.models.shape import ModelShape, Parameter
from hpcrl.planner.activations import FP32
from hpcrl.planner.adapters import adapters, published
from hpcrl.planner.image_memory import (
    feature_bytes,
    image_limit,
    image_tokens_of_row,
    largest_image_tokens,
    tower_forward,
)
from hpcrl.planner.memory_parts import BYTES, PHASES, Part, Phase, samples_of_a_step, split_size
from hpcrl.planner.trainer import train_plan
from hpcrl.spec.problems import Problem
from hpcrl.spec.table import load
from hpcrl.spec.tables import GEN_ENGINES, TRAIN_ENGINES
from hpcrl.spec.weight_layout import count

PREFILL_TOKENS = 4096
"""Equal to PREFILL_TOKENS in engines/gen/native/engine.py."""
NUMBER = re.compile(r"\.\d+\.")
LOGIT_COPIES = 3  # logits, probabilities, their cumulative sum; on a GPU also the probabilities as integers
TRUNCATED_COPIES = 8  # as above, with the copies that top-k, top-p or min-p sort and mask


def generator_parts(
    config: Config, shape: ModelShape, resident: tuple[Phase, ...], cached: tuple[Phase, ...], on_gpu: bool = False
) -> list[Part]:
    """Memory parts of a generator rank. `resident` are the phases with weights on the device, `cached` those with the
    KV cache."""
    generator, rollout, tensor = config.generator, config.rollout, config.layout.generator.tensor_parallel
    num_bytes, slots = BYTES[generator.dtype], generator.max_num_seqs
    weights = sum(split_size(p, shape, tensor, tensor) for p in shape.parameters) * num_bytes
    lora, engine = config.published_lora, GEN_ENGINES[config.gen_engine]
    low_rank = sum(p.size for p in adapters(lora, shape)) * num_bytes
    away = tuple(phase for phase in PHASES if phase not in resident) if lora is not None else ()
    if not engine.sleeps:  # frozen weights are read once from the model's folder, and stay on the device
        resident, away = (*resident, *away), ()
    truncates = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    copies = (TRUNCATED_COPIES if truncates else LOGIT_COPIES) + on_gpu
    logits = slots * shape.vocab_size * copies * FP32
    cache, least = _cache(config, shape)
    longest = config.data.max_prompt_tokens
    prompt = max(longest, min(PREFILL_TOKENS, slots * longest))
    # A GPU multiplies bfloat16 with a float32 result; other devices need a float32 copy of the vocabulary matrix.
    converted = bool(generator.head_dtype) and num_bytes != FP32 and not on_gpu
    head = shape.vocab_size * shape.hidden_size * FP32 // tensor if converted else 0
    kept, computed = _images(config, shape, prompt)
    prefill, decoding = prompt * prefill_width(shape) * num_bytes // tensor, _decoding(config, shape)
    return [
        Part("generator", "weights", weights, resident),
        Part("generator", "sleeping weights", weights * bool(away), away, on_host=True),
        Part("generator", "adapters", low_rank, resident),
        Part("generator", "float32 head", head, resident),
        Part("generator", "KV cache", cache, cached, least=least),
        Part("generator", "features of images", feature_bytes(shape.tower, kept, num_bytes), cached),
        Part("generator", "vision tower", tower_forward(shape.tower, computed, num_bytes), ("generate",)),
        Part("generator", "prefill" if prefill > decoding else "all experts", max(prefill, decoding), ("generate",)),
        Part("generator", "logits", logits, ("generate",)),
    ]


def _images(config: Config, shape: ModelShape, prefill: int) -> tuple[int, int]:
    """Tokens of images whose features the engine keeps, and of images that the tower computes at once in a prefill of
    this many tokens."""
    if shape.tower is None:
        return 0, 0
    engine = GEN_ENGINES[config.gen_engine]
    if engine.reserves_for_images:
        largest = min(config.max_image_tokens, largest_image_tokens(config, shape.tower))
        reserved = max(engine.kept_image_tokens, largest)
        return reserved, reserved
    existing = samples_of_a_step(config) * image_tokens_of_row(config, shape.tower)
    largest = image_limit(config, shape.tower)
    kept = max(engine.kept_image_tokens, largest)
    return min(kept, existing), min(max(prefill, largest), existing)


def in_one_process(config: Config, layout: RoleLayout) -> bool:
    """Whether the only trainer rank, whose plain parameters are what it publishes, is the only generator rank."""
    if config.merges_adapters:
        return False
    trainers = layout.ranks["trainer"]
    return trainers == layout.ranks["generator"] and TRAIN_ENGINES[config.train_engine].unsharded(config, len(trainers))


def shares_weights(config: Config, layout: RoleLayout) -> bool:
    """Whether the generator reads its weights from the trainer's parameters: both are in one process, use one dtype and
    are never active at the same time."""
    return (
        in_one_process(config, layout)
        and GEN_ENGINES[config.gen_engine].shares_weights
        and config.generator.dtype == config.base_dtype
        and config.rollout.max_staleness == 0
    )


def token_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of one token's KV cache on one rank. If there are more ranks than key and value heads, several ranks hold
    the same head. Every rank holds all latents."""
    if shape.caches:
        keys, latents = sum(cache.keys for cache in shape.caches), sum(cache.latents for cache in shape.caches)
        ranks = min(config.layout.generator.tensor_parallel, shape.num_kv_heads)
        return (-(-keys // ranks) + latents) * BYTES[config.generator.dtype]
    if shape.latent is not None:
        return shape.num_layers * (shape.latent.rank + shape.latent.rope) * BYTES[config.generator.dtype]
    heads = -(-shape.num_kv_heads // config.layout.generator.tensor_parallel)
    return 2 * shape.num_layers * heads * shape.head_dim * BYTES[config.generator.dtype]


def state_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of one sequence's recurrent states and last inputs of convolutions on one rank, whatever its length."""
    per_number = BYTES[config.generator.dtype]
    kept = sum(cache.state * FP32 + cache.convolved * per_number for cache in shape.caches)
    return -(-kept // config.layout.generator.tensor_parallel)


def response_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of a sequence of maximum length in the cache of one rank."""
    return token_bytes(config, shape) * config.max_sequence_tokens + state_bytes(config, shape)


def paged_cache(config: Config, shape: ModelShape) -> tuple[int, int]:
    """The `plan` of an engine with a paged cache in free memory: bytes for all slots at full length, and the minimum
    bytes, for one slot."""
    longest = response_bytes(config, shape)
    return longest * config.generator.max_num_seqs, longest


def too_small_cache(config: Config, engine: str, given: int | None, least: int) -> Iterator[Problem]:
    """Report a KV cache of `given` bytes (None: as many as available) that cannot hold one full-length response."""
    if given is not None and given < least:
        needed = f"{config.max_sequence_tokens} tokens, the longest prompt and response, need {least / 2**30:.4g}"
        remedy = "raise it, or lower data.max_prompt_tokens or rollout.max_new_tokens"
        yield Problem(
            ("generator", engine, "kv_cache_gib"),
            f"generator.{engine}.kv_cache_gib: {given / 2**30:.4g} GiB of KV cache, but {needed}; {remedy}",
            (("rollout", "max_new_tokens"), ("data", "max_prompt_tokens"), ("model",)),
        )


def _cache(config: Config, shape: ModelShape) -> tuple[int, int | None]:
    engine = config.generator.engine
    if path := GEN_ENGINES[engine].plan:
        found: tuple[int, int | None] = load(path, f"the plan of generator.engine={engine}")(config, shape)
        return found
    return paged_cache(config, shape)[0], None


def _decoding(config: Config, shape: ModelShape) -> int:
    """Bytes of a layer's products while the engine decodes, if they can be more than those of a prefill."""
    if not (path := GEN_ENGINES[config.gen_engine].decoding_plan):
        return 0
    return int(load(path, f"the plan of generator.engine={config.gen_engine}")(config, shape))


def rollout_transfer_parts(
    config: Config, layout: RoleLayout, shape: ModelShape, roles: Collection[RoleName]
) -> list[Part]:
    """Memory parts of a rank during a weight transfer (hpcrl.workers.weight_updates), without the training engine's
    gather: two steps' messages on each side, and on the receiving side the tensor that it assembles."""
    if layout.generates_on_trainers:
        return []
    plan, needed, parts = train_plan(config), needed_bytes(config, layout, shape), []
    step = min(BUCKET_BYTES, sum(needed))
    if "trainer" in roles:
        sent = 2 * step // plan.num_senders(config, len(layout.ranks["trainer"]))
        parts.append(Part("trainer", "weights to send", sent, ("publish",)))
    if "generator" in roles:
        received = 2 * step * max(needed) // sum(needed)
        received += max(p.size for p in published(config, shape, first=True).parameters) * BYTES[config.generator.dtype]
        parts.append(Part("generator", "weights received", received, ("publish",)))
    return parts


def needed_bytes(config: Config, layout: RoleLayout, shape: ModelShape) -> list[int]:
    """Bytes of new weights that each rank of a replica requires."""
    need, size = GEN_ENGINES[config.gen_engine].required_slices, layout.generator_tensor_parallel
    alike: dict[tuple[object, ...], list[Parameter]] = {}  # tensors of different layers, of which a rank needs as many
    for p in published(config, shape).parameters:
        alike.setdefault((NUMBER.sub(".", p.name), p.shape, p.split), []).append(p)
    return [
        sum(
            len(group) * ITEM_BYTES[needed.dtype or config.model.dtype] * sum(map(count, needed.slices))
            for group in alike.values()
            for needed in (need(config, shape, group[0].name, group[0].shape, index, size),)
        )
        for index in range(size)
    ]


def update_traffic(config: Config, layout: RoleLayout, shape: ModelShape) -> tuple[int, int]:
    """(maximum bytes to a generator rank, mean bytes from a trainer rank) in a weight update, if no rank has both
    roles. If generators run on trainer ranks, the trainers' gather sends each rank all missing parts of full tensors.
    """
    trainers = len(layout.ranks["trainer"])
    if layout.generates_on_trainers:
        whole = published(config, shape).num_parameters * BYTES[config.generator.dtype]
        return whole - whole // trainers, whole - whole // trainers
    needed = needed_bytes(config, layout, shape)
    return max(needed), sum(needed) * len(layout.replicas) // trainers


def prefill_width(shape: ModelShape) -> int:
    """Numbers per token that a layer of a forward pass without gradients holds at once."""
    heads = 2 * (shape.query_size + 2 * shape.key_size)
    if shape.latent is not None:  # queries for latents, a copy of them, and sums of latents
        latent = shape.num_heads * (3 * shape.latent.rank + 2 * shape.latent.rope)
        heads = max(heads, shape.query_size + latent)
    return 3 * shape.hidden_size + heads + _mlp_width(shape)


def _mlp_width(shape: ModelShape) -> int:
    """Numbers per token that the widest feed-forward layer holds at once."""
    dense = 3 * shape.intermediate_size if len(shape.expert_layers) < shape.num_layers else 0
    return max(dense, shape.experts_per_token * (shape.hidden_size + 3 * shape.expert_size) + 3 * shape.shared_size)


def check_engine_sizes(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """Problems that the generation engine's check of sizes reports for a model of this shape."""
    engine = config.generator.engine
    if path := GEN_ENGINES[engine].check_sizes:
        yield from load(path, f"the check of generator.engine={engine}")(config, shape)


def check_replicas_split(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """Report sizes of the model that the number of ranks in a replica does not divide."""
    tensor, path = config.layout.generator.tensor_parallel, ("layout", "generator", "tensor_parallel")
    sizes = {"attention heads": shape.num_heads}
    if len(shape.expert_layers) < shape.num_layers:
        sizes["numbers of intermediate_size"] = shape.intermediate_size
    if shape.expert_layers:
        sizes["numbers of an expert's width"] = shape.expert_size
    for reason in (f"the {size} {name}" for name, size in sizes.items() if size % tensor):
        text = f"layout.generator.tensor_parallel: {tensor} does not divide {reason} of the model"
        yield Problem(path, text, (("model",),))
    if shape.expert_layers and tensor > shape.num_experts:
        text = f"layout.generator.tensor_parallel: {tensor} is more than the {shape.num_experts} experts of the model"
        yield Problem(path, text, (("model",),))
    if shape.num_kv_heads % tensor and tensor % shape.num_kv_heads:
        text = f"{tensor} neither divides the {shape.num_kv_heads} key and value heads nor is a multiple of them"
        yield Problem(path, f"layout.generator.tensor_parallel: {text}", (("model",),))
