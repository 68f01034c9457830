"""Memory of vLLM's KV cache, and vLLM's requirements for sizes and ranks."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.engines.gen.vllm.spec import VLLMConfig
from hpcrl.models.shape import ModelShape
from hpcrl.planner.generator import state_bytes, token_bytes, too_small_cache
from hpcrl.spec.problems import Problem
from hpcrl.spec.tables import ROLES

BLOCK_TOKENS = 128
"""Number of tokens in a block on a CPU; blocks on GPUs are smaller."""


def cache(config: Config, shape: ModelShape) -> tuple[int, int]:
    """(bytes, minimum bytes with which vLLM starts) of the cache on one rank: generator.vllm.kv_cache_gib or all slots
    at full length."""
    given = config.generator.section(VLLMConfig).kv_cache_bytes
    if given is not None:
        return given, given
    blocks, block = _longest(config), _block_bytes(config, shape)
    states, slots = state_bytes(config, shape), config.generator.max_num_seqs
    return (slots * blocks + 1) * block + slots * states, (blocks + 1) * block + states


def check(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """Report a cache that is too small for one full-length response, and replicas whose ranks vLLM cannot number (see
    world_of in hpcrl.engines.gen.vllm.replica)."""
    given, block = config.generator.section(VLLMConfig).kv_cache_bytes, _block_bytes(config, shape)
    least = (_longest(config) + 1) * block + state_bytes(config, shape)
    yield from too_small_cache(config, "vllm", given, least)
    layout, size = RoleLayout.from_config(config), config.layout.generator.tensor_parallel
    for role in (name for name, spec in ROLES.items() if spec.owns_default_group):
        ranks = layout.ranks[role]
        begins = [ranks.index(replica[0]) for replica in layout.replicas if replica[0] in ranks]
        if begins and (len(ranks) % size or any(first % size for first in begins)):
            text = (
                f"on {role} ranks vLLM needs a multiple of {size} of them, and every replica to begin at one; there "
                f"are {len(ranks)}, and replicas begin at number {', '.join(map(str, begins))}"
            )
            path = ("layout", "generator", "tensor_parallel")
            yield Problem(path, f"layout.generator.tensor_parallel: {text}", (("layout",),))


def _longest(config: Config) -> int:
    """Blocks of the longest sequence."""
    return -(-config.max_sequence_tokens // BLOCK_TOKENS)


def _block_bytes(config: Config, shape: ModelShape) -> int:
    return BLOCK_TOKENS * token_bytes(config, shape)
