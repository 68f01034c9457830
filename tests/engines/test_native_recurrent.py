"""States of recurrent layers in the native generator: kept positions, memory, and weights in a trainer's layout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.engines.gen.generation_engine import Request, SamplingParams
from hpcrl.engines.gen.native.blocks import Blocks, Match
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.gen.native.memory import cache
from hpcrl.models.families import read_shape
from hpcrl.planner.generator import state_bytes
from tests.engines.test_native import CONFIGS, engine_of, largest_error, make_model, mixed_requests, prompt_of, run
from tests.engines.test_native_cache import BLOCK, budget, counting, group
from tests.planner.test_memory import run as run_config

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp(request.param)
    model = make_model(CONFIGS[request.param])
    model.save_pretrained(path)
    return model, path


def turn(episode: int, prompt: list[int], seed: int) -> Request:
    return Request(episode, prompt, SamplingParams(9, ignore_eos=True), seed, continues=True)


def test_prompts_longer_than_chunks_match_transformers(folder: tuple[Any, Path]) -> None:
    """From an empty state and from a kept one, in rows of unequal lengths."""
    model, path = folder
    engine, start = engine_of(path, max_length=256), prompt_of(0, 70)
    run(engine, [Request(9, start, SamplingParams(1), seed=0)])
    requests = [
        Request(i, ids, SamplingParams(4), seed=i)
        for i, ids in enumerate(([*start, *prompt_of(1, 150)], [*start, *prompt_of(2, 64)], prompt_of(3, 200)))
    ]
    assert largest_error(model, requests, run(engine, requests))[0] < 1e-5


@pytest.mark.parametrize(("episodes", "again"), [(3, 0), (6, 60)])
def test_a_turn_continues_from_the_state_of_the_turn_before(
    episodes: int, again: int, folder: tuple[Any, Path]
) -> None:
    """Unless other states were kept later: as many are kept as there are slots."""
    model, path = folder
    engine = counting(path, max_num_seqs=4)
    contexts = {i: prompt_of(i, 21) for i in range(episodes)}
    for number in range(3):
        requests = [turn(i, context, 10 * number + i) for i, context in contexts.items()]
        before = engine.prefilled
        outputs = run(engine, requests)
        assert largest_error(model, requests, outputs)[0] < 1e-4
        if number:
            new = engine.prefilled - before - 6 * episodes
            assert new == 0 if not again else new > again
        contexts = {i: [*ids, *outputs[i].token_ids.tolist(), *prompt_of(50 + i, 6)] for i, ids in contexts.items()}


def test_prefixes_without_a_kept_state_are_computed_again(folder: tuple[Any, Path]) -> None:
    model, path = folder
    engine, start = counting(path), prompt_of(9, 3 * BLOCK)
    requests = [Request(i, start + prompt_of(i, 4 + i), SamplingParams(8), seed=i) for i in range(3)]
    outputs = run(engine, requests)
    assert engine.prefilled == sum(3 * BLOCK + 3 + i for i in range(3))
    assert largest_error(model, requests, outputs)[0] < 1e-4


def test_recomputed_requests_that_no_longer_fit_wait(folder: tuple[Any, Path]) -> None:
    """Group members shared their prompt's blocks, but each is computed from its beginning."""
    model, path = folder
    engine = counting(path, kv_cache_bytes=budget(9, path))
    requests = group(prompt_of(0, 5 * BLOCK), 4, new=20)
    engine.add(requests)
    engine.step(6)
    running = engine._slots.num_live
    engine.recompute()
    assert running > engine._slots.num_live >= 1 and len(engine._waiting) == 4 - engine._slots.num_live
    outputs = run(engine, [])
    assert all(len(outputs[r.id].token_ids) == r.params.max_new_tokens for r in requests)
    assert largest_error(model, requests, outputs)[0] < 1e-4


def test_kept_states_are_found_by_their_tokens_and_replaced() -> None:
    blocks, tokens = Blocks(9, 4, num_states=2), np.arange(20, dtype=np.int32)
    mine = blocks.allocate(3)
    blocks.insert(tokens[:6], mine[:2], 1)
    first = blocks.keep_state(tokens[:6])
    assert first is not None and blocks.keep_state(tokens[:6]) is None
    for length, cached in ((5, 0), (6, 6), (7, 6), (20, 6)):
        match = blocks.match(tokens[:length])
        assert 4 * len(match.blocks) + match.tail_tokens == cached
        assert match.state == (first if cached else None)
    assert blocks.match(tokens[:7]).without_tail() == Match([])
    blocks.insert(tokens[:12], mine, 1)  # the block that ended at 6 now ends at 8
    second = blocks.keep_state(tokens[:12])
    assert blocks.match(tokens[:11]).blocks == [] and blocks.match(tokens[:13]).state == second
    others = blocks.allocate(2)
    for number, block in enumerate(others):
        other = np.arange(100 * number, 100 * number + 4, dtype=np.int32) + 100
        blocks.insert(other, [block], 1)
        assert blocks.keep_state(other) is not None
    assert blocks.match(tokens[:13]).blocks == [], "the state that was used longest ago was dropped"
    again = blocks.allocate(3)
    assert blocks.insert(tokens[:12], again, 1) == again[2:], "the last block of a prefix without a state is replaced"
    assert blocks.keep_state(tokens[:12], pinned=range(2)) is None
    last = blocks.keep_state(tokens[:12], expected=True)
    assert blocks.match(tokens[:13]).blocks == [*mine[:2], again[2]]
    assert blocks.insert(tokens[:16], [*again, *blocks.allocate(1)], 1) == [8]
    assert blocks.keep_state(tokens[:16]) is not None
    assert blocks.match(tokens[:12]).state == last is not None, "an expected state is not dropped for another one"
    blocks.insert(tokens, [*again, 8, *others[:1]], 1)
    blocks.use_state(last)
    assert blocks.keep_state(tokens) is not None and blocks.keep_state(tokens[:8]) is not None
    assert blocks.match(tokens[:12]).blocks == mine[:2], "the expected state was used, then dropped"


def test_states_have_the_planned_memory_and_free_it(folder: tuple[Any, Path]) -> None:
    _, path = folder
    shape = read_shape(json.loads((path / "config.json").read_text()))
    config = run_config(1, generator={"max_num_seqs": 4, "dtype": "float32"})
    engine = engine_of(path, block_tokens=32)
    assert engine._states is not None and engine._arch.delta is not None
    run(engine, mixed_requests(4))
    allocated = sum(states.nbytes for states in (engine._states._recurrent, engine._states._convolved))
    assert allocated == 2 * 4 * sum(engine._arch.recurrent) * engine._arch.delta.state_bytes(torch.float32)
    assert allocated == 2 * 4 * state_bytes(config, shape)
    stateless = tuple(dataclasses.replace(each, state=0, convolved=0) for each in shape.caches)
    without = dataclasses.replace(shape, caches=stateless)
    assert cache(config, shape)[0] == cache(config, without)[0] + allocated
    engine.sleep()
    assert engine._states._recurrent.nbytes == engine._states._convolved.nbytes == 0


def test_weights_in_a_trainers_layout_give_the_same_log_probs(folder: tuple[Any, Path]) -> None:
    model, path = folder
    given, engine = model.state_dict(), engine_of(path, load=False)
    own = engine.share_weights()
    joint = ("q_proj.weight", "in_proj_qkvz.weight", "in_proj_qkv.weight")
    assert all(name in own for name in given if name.endswith(joint)), "as large matrices are not copied"
    mine = {name: own[name].copy_(tensor) if name in own else tensor for name, tensor in given.items()}
    engine.load_weights(mine.items(), version=1)
    requests = mixed_requests()
    assert max(largest_error(model, requests, run(engine, requests))) < 1e-5


def test_new_states_do_not_depend_on_old_numbers(folder: tuple[Any, Path]) -> None:
    """Free slots may hold anything."""
    model, path = folder
    engine: NativeEngine = engine_of(path)
    run(engine, mixed_requests(3))
    assert engine._states is not None
    with torch.inference_mode():
        engine._states._recurrent.fill_(torch.nan)
        engine._states._convolved.fill_(torch.nan)
    engine.load_weights(model.state_dict().items(), version=1)
    requests = mixed_requests()
    assert max(largest_error(model, requests, run(engine, requests))) < 1e-5
