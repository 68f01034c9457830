"""The native generator's KV cache: shared prefixes, the memory budget, and new weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.engines.gen.generation_engine import Output, Request, SamplingParams
from hpcrl.engines.gen.native.architecture import read_architecture
from hpcrl.engines.gen.native.blocks import Blocks
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.gen.native.kv import KVCache, block_bytes
from tests.engines.test_native import (
    CONFIGS,
    engine_of,
    largest_error,
    logits_of,
    make_model,
    prompt_of,
    run,
)
from tests.planner.measuring import peak_bytes

pytestmark = pytest.mark.numerics
BLOCK = 16


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("qwen3")
    model = make_model(CONFIGS["qwen3"])
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module", params=["qwen3", "qwen3_next"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """With attention only, and with recurrent layers."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(CONFIGS[request.param])
    model.save_pretrained(folder)
    return model, folder


class Counting(NativeEngine):
    """Counts the tokens whose keys and values it computes before decoding."""

    prefilled = 0

    def _prefill(self, rows: Any) -> None:
        self.prefilled += sum(len(row.tokens) for row in rows)
        super()._prefill(rows)


def counting(folder: Path, **options: Any) -> Counting:
    return Counting(
        folder, **({"max_num_seqs": 4, "max_length": 128, "dtype": torch.float32, "block_tokens": BLOCK} | options)
    )


def budget(num_blocks: int, folder: Path, slots: int = 4) -> int:
    """Bytes of some blocks, and of all recurrent states."""
    architecture = engine_of(folder, load=False)._arch
    states = 0
    if architecture.delta is not None:
        states = 2 * slots * sum(architecture.recurrent) * architecture.delta.state_bytes(torch.float32)
    return num_blocks * block_bytes(architecture, BLOCK, torch.float32) + states


def group(prompt: Sequence[int], size: int, first_id: int = 0, new: int = 12) -> list[Request]:
    ids = range(first_id, first_id + size)
    return [Request(i, prompt, SamplingParams(new + i % 5, ignore_eos=True), seed=i) for i in ids]


def used(engine: NativeEngine) -> int:
    """The number of blocks in use, counted by requests and checked against the free blocks."""
    blocks = engine._blocks
    assert np.count_nonzero(blocks.users) == blocks.num_blocks - blocks.num_free
    return int(np.count_nonzero(blocks.users))


@pytest.mark.parametrize("length", [40, 33, 32, 7, 1])
def test_a_prompt_is_computed_once_for_any_number_of_prefill_batches(length: int, either: tuple[Any, Path]) -> None:
    model, folder = either
    engine = counting(folder)
    groups = [group(prompt_of(seed, length), 10, first_id=10 * seed) for seed in range(2)]
    requests = [request for each in groups for request in each]
    outputs = run(engine, requests)
    assert engine.prefilled == 2 * (length - 1)
    assert largest_error(model, requests, outputs)[0] < 1e-4
    later = group(groups[1][0].prompt_ids, 3, first_id=50)
    assert largest_error(model, later, run(engine, later))[0] < 1e-4
    assert engine.prefilled == 2 * (length - 1)
    assert used(engine) == 0


def test_group_members_share_the_blocks_of_their_prompt(qwen3: tuple[Any, Path]) -> None:
    _, folder = qwen3
    engine = engine_of(folder, max_num_seqs=8, block_tokens=BLOCK)
    engine.add(group(prompt_of(0, 6 * BLOCK + 3), 8))
    engine.step(2)
    assert used(engine) == 6 + 8
    assert [end - first for first, end in engine._cache.ranges] == [8, 6]
    engine.abort(range(7))
    engine.step(1)
    assert used(engine) == 7 and engine._cache.ranges == [(0, 7)]


def test_groups_of_different_sizes_share_their_prompts(either: tuple[Any, Path]) -> None:
    """The blocks of a large group do not enlarge the products of a small group."""
    model, folder = either
    engine = engine_of(folder, max_num_seqs=24, block_tokens=BLOCK)
    sizes = {1: 33, 2: 50, 3: 70, 13: 34}
    requests = [
        r for size, length in sizes.items() for r in group(prompt_of(size, length), size, first_id=100 * size, new=3)
    ]
    engine.add(requests)
    engine.step(2)
    assert engine._decoding is not None
    # Of each block, the products have 2 q heads for each of 2 kv heads, times the most readers.
    sizes_of = [(rows.stop - rows.start) / (at.stop - at.start) for at, rows in engine._decoding.products]
    assert sizes_of == [4 * readers for readers in (1, 2, 3, 13)]
    assert largest_error(model, requests, run(engine, []))[0] < 1e-4


def test_prompts_with_a_common_prefix_share_its_blocks(qwen3: tuple[Any, Path]) -> None:
    """In the same prefill batch, where the second must be computed after the first, and in a later one."""
    model, folder = qwen3
    engine = counting(folder)
    start = prompt_of(9, 3 * BLOCK)
    requests = [Request(i, start + prompt_of(i, 4 + i), SamplingParams(8), seed=i) for i in range(7)]
    outputs = run(engine, requests)
    assert engine.prefilled == 3 * BLOCK + sum(3 + i for i in range(7))
    assert largest_error(model, requests, outputs)[0] < 1e-4


@pytest.mark.parametrize("deterministic", [False, True])
def test_each_turn_of_an_episode_computes_only_its_new_tokens(deterministic: bool, qwen3: tuple[Any, Path]) -> None:
    """Every turn begins with the tokens of the turns before it; deterministic mode computes them again."""
    model, folder = qwen3
    engine = counting(folder, max_num_seqs=3, deterministic=deterministic)
    contexts = {i: prompt_of(i % 2, 21) for i in range(4)}
    new = 0
    for turn in range(4):
        requests = [
            Request(i, contexts[i], SamplingParams(9, ignore_eos=True), 10 * turn + i, continues=True) for i in range(4)
        ]
        outputs = run(engine, requests)
        assert largest_error(model, requests, outputs)[0] < 1e-4
        for i in range(4):
            observation = prompt_of(100 + 10 * turn + i, 6)
            contexts[i] = [*contexts[i], *outputs[i].token_ids.tolist(), *observation]
        # The last token of a response is not cached; decoding computes the last token of a prompt.
        new += (2 * 20) if turn == 0 else 4 * 6
    assert engine.prefilled == new if not deterministic else engine.prefilled > 3 * new
    kept = counting(folder)
    requests = [replace(requests[0], prompt_ids=prompt_of(0, 21), continues=False)]
    first = run(kept, requests)[0]
    run(kept, [replace(requests[0], prompt_ids=[*prompt_of(0, 21), *first.token_ids.tolist(), 5])])
    assert kept.prefilled == 20 + 10, "a response that is not continued is not kept"


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_small_budget_delays_requests_and_changes_no_response(deterministic: bool, either: tuple[Any, Path]) -> None:
    model, folder = either
    rng = np.random.default_rng(3)
    requests = [
        Request(
            i,
            prompt_of(i // 2, int(rng.integers(1, 50))),
            SamplingParams(int(rng.integers(1, 78)), ignore_eos=True, stop_token_ids=(7,), top_p=0.9 if i % 3 else 1.0),
            seed=i,
        )
        for i in range(24)
    ]
    roomy = run(engine_of(folder, max_num_seqs=6, block_tokens=BLOCK), requests)
    for num_blocks in (8, 11, 17) if model.config.model_type == "qwen3" else (11,):
        engine = engine_of(
            folder,
            max_num_seqs=6,
            block_tokens=BLOCK,
            kv_cache_bytes=budget(num_blocks, folder, slots=6),
            deterministic=deterministic,
        )
        interrupted = 0
        engine.add(requests)
        outputs: dict[int, Output] = {}
        progress = engine.progress()
        while progress:
            outputs |= {o.id: o for o in engine.step(3)}
            waiting = [i for i, queued in engine._waiting.items() if len(queued.output_so_far["token_ids"])]
            interrupted += len(waiting)
            before, progress = progress, engine.progress()
            assert all(progress[i] >= before[i] for i in progress)
            assert engine._cache.capacity <= num_blocks
        assert (interrupted > 0) == (not deterministic)
        assert outputs.keys() == roomy.keys()
        assert all(np.array_equal(outputs[i].token_ids, roomy[i].token_ids) for i in roomy)
        assert max(largest_error(model, requests, outputs)) < 1e-4
        assert used(engine) == 0


def test_a_preempted_request_can_be_aborted_with_its_tokens(either: tuple[Any, Path]) -> None:
    model, folder = either
    requests = [Request(i, prompt_of(i, 30), SamplingParams(90, ignore_eos=True), seed=i) for i in range(3)]
    whole = run(engine_of(folder), requests)
    engine = engine_of(folder, block_tokens=BLOCK, kv_cache_bytes=budget(9, folder))
    engine.add(requests)
    while not any(count for i, count in engine.progress().items() if i in engine._waiting):
        engine.step(1)
    request_id, count = next((i, c) for i, c in engine.progress().items() if i in engine._waiting and c)
    engine.load_weights(make_model(model.config, seed=1).state_dict().items(), version=3)
    engine.step(1)
    output = engine.abort([request_id])[0]
    assert len(output.versions) == count and (output.versions == 0).all()
    assert np.array_equal(output.token_ids, whole[request_id].token_ids[:count])
    assert np.allclose(output.gen_logprobs, whole[request_id].gen_logprobs[:count], atol=1e-5)


def test_a_budget_for_less_than_one_request_is_refused(either: tuple[Any, Path]) -> None:
    _, folder = either
    least = budget(8, folder)
    engine_of(folder, block_tokens=BLOCK, kv_cache_bytes=least)
    with pytest.raises(ValueError, match=f"kv_cache_bytes is {least - 1}, but .* max_length 128 needs {least}"):
        engine_of(folder, block_tokens=BLOCK, kv_cache_bytes=least - 1)


def test_the_least_recently_used_prefixes_are_evicted_first(qwen3: tuple[Any, Path]) -> None:
    _, folder = qwen3
    engine = counting(folder, kv_cache_bytes=budget(14, folder))
    prompts = [prompt_of(seed, 3 * BLOCK + 1) for seed in range(3)]

    def computes(seed: int) -> int:
        before = engine.prefilled
        params = SamplingParams(4, ignore_eos=True)
        run(engine, [Request(seed, prompts[seed], params, seed=seed, continues=True)])
        return engine.prefilled - before

    assert [computes(seed) for seed in (0, 1, 2, 0)] == [3 * BLOCK] * 3 + [0]
    run(engine, [Request(9, prompt_of(9, 5 * BLOCK), SamplingParams(4), seed=9)])  # replaces one of them
    assert [computes(seed) for seed in (0, 2)] == [0, 0] and computes(1) > 0


@pytest.mark.parametrize(("lag", "later", "computed"), [(0, 1, 1), (1, 1, 0), (1, 2, 1), (2, 2, 0)])
def test_new_weights_clear_the_prefix_cache(lag: int, later: int, computed: int, either: tuple[Any, Path]) -> None:
    """Unless older ones may be used; then a response continues from keys and values of the old weights."""
    model, folder = either
    engine = counting(folder, prefix_staleness=lag)
    prompt = prompt_of(0, 40)
    run(engine, group(prompt, 1))
    new = make_model(model.config, seed=1)
    engine.load_weights(new.state_dict().items(), version=later)
    assert (not engine._blocks.evictable) == bool(computed)
    request = Request(0, prompt, SamplingParams(1, ignore_eos=True), seed=0)
    outputs = run(engine, [request])
    assert engine.prefilled == 39 * (1 + computed)
    expected = logits_of(new, request, outputs[0]).log_softmax(-1)[0, int(outputs[0].token_ids[0])].item()
    assert (abs(outputs[0].gen_logprobs[0] - expected) < 1e-4) == bool(computed)


def test_group_members_admitted_after_new_weights_recompute_their_prompt(either: tuple[Any, Path]) -> None:
    """Running members keep their keys and values, which no other request uses."""
    model, folder = either
    engine = counting(folder, max_num_seqs=2)
    prompt = prompt_of(0, 40)
    engine.add(group(prompt, 2, new=30))
    engine.step(3)
    new = make_model(model.config, seed=1)
    engine.load_weights(new.state_dict().items(), version=1)
    later = group(prompt, 4, first_id=10)
    outputs = run(engine, later)
    assert engine.prefilled == 2 * 39
    assert largest_error(new, later, outputs)[0] < 1e-4


def test_recomputing_shares_prompts_between_group_members(qwen3: tuple[Any, Path]) -> None:
    _, folder = qwen3
    engine = counting(folder, max_num_seqs=4, kv_cache_bytes=budget(9, folder))
    requests = group(prompt_of(0, 5 * BLOCK), 4, new=20)
    engine.add(requests)
    engine.step(6)
    new = make_model(CONFIGS["qwen3"], seed=1)
    engine.load_weights(new.state_dict().items(), version=1)
    running = [count for count in engine.progress().values() if count]
    engine.prefilled = 0
    engine.recompute()
    assert engine.prefilled == 5 * BLOCK + sum(count - 1 for count in running)
    outputs = run(engine, [])
    for request in requests:
        at = outputs[request.id].versions == 1
        ids = torch.from_numpy(outputs[request.id].token_ids).long()[:, None]
        expected = logits_of(new, request, outputs[request.id]).log_softmax(-1).gather(1, ids)[:, 0].numpy()
        assert np.allclose(outputs[request.id].gen_logprobs[at], expected[at], atol=1e-4)


def test_memory_is_freed_after_long_sequences(qwen3: tuple[Any, Path]) -> None:
    model, folder = qwen3
    engine = engine_of(folder, max_num_seqs=4, block_tokens=BLOCK)
    run(engine, [Request(i, prompt_of(i, 10), SamplingParams(110, ignore_eos=True), seed=i) for i in range(4)])
    long = engine._cache.capacity
    assert 32 <= long <= 36
    for version in (1, 2):
        engine.load_weights(model.state_dict().items(), version)
        run(engine, [Request(i, prompt_of(i, 10), SamplingParams(5), seed=i) for i in range(4)])
    engine.load_weights(model.state_dict().items(), 3)
    assert engine._cache.capacity <= 8
    assert all(layer.shape[1] == engine._cache.capacity for layer in engine._cache.layers)


@pytest.mark.parametrize(("before", "after"), [(0, 40), (32, 40), (40, 32)])
def test_resizing_the_cache_needs_extra_memory_for_only_one_layer(
    before: int, after: int, qwen3: tuple[Any, Path], tmp_path: Path
) -> None:
    """As planned; the blocks keep their content."""
    architecture = read_architecture(qwen3[1])
    most, blocks = max(before, after), np.arange(min(before, after))
    held = torch.rand(2, before, architecture.num_kv_heads, BLOCK, architecture.head_dim)
    cache = KVCache(architecture, most, BLOCK, torch.float32, torch.device("cpu"))
    first = np.zeros(0)

    def change() -> None:
        nonlocal first
        cache.compact([blocks[:3], blocks[3:9]], blocks[9:], before)
        first = cache.places
        for layer in cache.layers:
            layer.copy_(held)
        cache.compact([blocks[3:9]], np.r_[9:after, 0:3], after)

    planned = most * block_bytes(architecture, BLOCK, torch.float32) * (1 + 1 / architecture.num_layers)
    assert peak_bytes(change, tmp_path / "trace.json") <= planned + 4096  # beside it, where blocks go
    assert cache.capacity == after
    for layer in cache.layers:
        assert torch.equal(layer[:, cache.places[blocks]], held[:, first[blocks]]) and layer.isfinite().all()


def test_new_weights_may_arrive_at_any_time(either: tuple[Any, Path]) -> None:
    """Also when a reserved block is about to be used, for which there is no memory yet."""
    model, folder = either
    engine = engine_of(folder, max_num_seqs=1, block_tokens=4, deterministic=True)
    request = Request(0, prompt_of(0, 10), SamplingParams(30, ignore_eos=True), seed=0)
    expected = run(engine, [request])[0]
    engine.sleep()
    engine.add([request])
    outputs: list[Output] = []
    while engine.progress():
        engine.load_weights(model.state_dict().items(), 0)
        outputs += engine.step(1)
    assert np.array_equal(outputs[0].gen_logprobs, expected.gen_logprobs)


def test_prompts_that_are_not_repeated_do_not_make_the_cache_grow(qwen3: tuple[Any, Path]) -> None:
    """Prefixes of continuing episodes do."""
    _, folder = qwen3

    def capacity(continues: bool) -> int:
        engine = engine_of(folder, max_num_seqs=2, block_tokens=BLOCK)
        params = SamplingParams(6, ignore_eos=True)
        run(engine, [Request(i, prompt_of(i, 3 * BLOCK), params, seed=i, continues=continues) for i in range(12)])
        return engine._cache.capacity

    assert 8 <= capacity(continues=False) <= 14
    assert capacity(continues=True) == 2 * 8, "the whole budget"


def test_blocks_are_found_and_evicted_by_their_tokens() -> None:
    """Against a model: every known prefix is found, the longest first, and evicted last block first."""
    blocks, tokens = Blocks(6, 4), np.arange(10, dtype=np.int32)
    mine = blocks.allocate(3)
    assert blocks.insert(tokens, mine, 5) == mine and blocks.num_free == 3
    for length, (full, tail) in {3: (0, 3), 4: (1, 0), 7: (1, 3), 9: (2, 1), 10: (2, 2)}.items():
        found = blocks.match(tokens[:length])
        assert (found.blocks, found.tail_tokens) == (mine[:full], tail)
        assert found.tail == (mine[full] if tail else None)
    assert blocks.match(tokens[1:]).blocks == [] and blocks.match(tokens[1:]).tail is None
    longer = np.arange(12, dtype=np.int32)
    found = blocks.match(longer)
    assert (found.blocks, found.tail, found.tail_tokens, found.version) == (mine[:2], mine[2], 2, 5)
    assert blocks.insert(longer, mine, 4) == [mine[2]], "a block that was filled further is known by all of its tokens"
    assert blocks.match(longer).blocks == mine and blocks.match(longer).version == 4
    blocks.add_users(mine[:1])
    blocks.free(mine)
    assert blocks.num_free == 5 and blocks.evictable == [mine[2], mine[1]]
    blocks.allocate(4)
    assert blocks.match(longer).blocks == mine[:2]
    blocks.allocate(1)
    assert blocks.match(longer).blocks == mine[:1] and blocks.num_free == 0
    blocks.evict_before(6)
    assert blocks.match(longer).blocks == [] and blocks.num_free == 0, "it is still in use"


@pytest.mark.parametrize("lag", [0, 1])
def test_a_response_begun_under_too_old_weights_is_not_cached(lag: int, either: tuple[Any, Path]) -> None:
    """Its next turn and another member of its group get the log-probs of the new weights."""
    model, folder = either
    engine = counting(folder, prefix_staleness=lag)
    prompt = prompt_of(0, 40)
    first = Request(0, prompt, SamplingParams(20, ignore_eos=True), seed=0, continues=True)
    engine.add([first])
    engine.step(3)
    for version in range(1, lag + 2):
        engine.load_weights(make_model(model.config, seed=version).state_dict().items(), version=version)
    output = run(engine, [])[0]
    engine.prefilled = 0
    turns = [
        Request(i, ids, SamplingParams(5), seed=i)
        for i, ids in enumerate(([*prompt, *output.token_ids.tolist(), 5], prompt))
    ]
    outputs = run(engine, turns)
    # A recurrent model has no state after 39 of the turn's tokens.
    assert engine.prefilled == (60 if model.config.model_type == "qwen3" else 60 + 39)
    assert largest_error(make_model(model.config, seed=lag + 1), turns, outputs)[0] < 1e-4


def test_recomputing_never_needs_more_blocks_than_exist(either: tuple[Any, Path]) -> None:
    """Also when running requests have filled their blocks, so one of them is about to be preempted."""
    model, folder = either
    engine = counting(folder, max_num_seqs=2, max_length=5 * BLOCK, kv_cache_bytes=budget(5, folder, slots=2))
    requests = [Request(i, prompt_of(i, 20), SamplingParams(30, ignore_eos=True), seed=i) for i in range(2)]
    engine.add(requests)
    while engine._slots.positions[0] < 2 * BLOCK:
        engine.step(1)
    assert engine._slots.num_live == 2 and engine._blocks.num_free == 1
    engine.recompute()
    assert largest_error(model, requests, run(engine, []))[0] < 1e-4


def test_a_request_waiting_behind_an_aborted_one_is_admitted(qwen3: tuple[Any, Path]) -> None:
    _, folder = qwen3
    engine = engine_of(folder, block_tokens=BLOCK, kv_cache_bytes=budget(8, folder))
    params = SamplingParams(20, ignore_eos=True)
    engine.add([Request(i, prompt_of(i, length), params, seed=i) for i, length in enumerate((60, 90, 5))])
    engine.step(1)
    engine.abort([1])
    engine.step(1)
    assert engine.progress() == {0: 2, 2: 1}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["continue", "recompute"])
def test_any_order_of_calls_gives_the_same_responses(mode: str, either: tuple[Any, Path]) -> None:
    """Requests, steps, aborts, new weights at random, with a full cache: tokens of one policy have its log-probs, and
    at the end no block is in use."""
    model, folder = either
    models = [make_model(model.config, seed) for seed in range(3)]
    for seed in range(3 if model.config.model_type == "qwen3" else 1):
        rng = np.random.default_rng(seed)
        engine = engine_of(
            folder, max_num_seqs=6, max_length=40, block_tokens=4, kv_cache_bytes=budget(4, folder, slots=6)
        )
        stems = [prompt_of(10 * seed + i, 15) for i in range(2)]
        born: dict[int, int] = {}
        requests: dict[int, Request] = {}
        outputs: dict[int, Output] = {}
        for version in range(4):
            engine.load_weights(models[version % 3].state_dict().items(), version)
            if mode == "recompute":
                engine.recompute()
            for i, count in engine.progress().items():
                born[i] = born[i] if count or i in engine._slots.slot_of else version
            for _ in range(3):
                stem = stems[int(rng.integers(2))]
                prompt = [*stem[: int(rng.integers(1, 16))], *prompt_of(len(requests), int(rng.integers(4)))]
                params = SamplingParams(int(rng.integers(1, 20)), temperature=rng.choice([0.0, 1.0]), ignore_eos=True)
                continues = bool(rng.integers(2))
                new = [Request(len(requests) + i, prompt, params, seed=i, continues=continues) for i in range(3)]
                engine.add(new)
                requests |= {request.id: request for request in new}
                born |= {request.id: version for request in new}
                done = [*engine.step(int(rng.integers(1, 9))), *engine.abort([int(rng.integers(len(requests)))])]
                outputs |= {output.id: output for output in done if len(output.token_ids)}
                stems += [[*requests[o.id].prompt_ids, *o.token_ids.tolist()][:15] for o in done]
                stems = stems[-2:]
                used(engine)
        outputs |= run(engine, [])
        assert used(engine) == 0
        for i, output in outputs.items():
            ids = torch.from_numpy(output.token_ids).long()[:, None]
            if mode == "continue" and born[i] != output.versions[-1]:
                continue
            for version in set(output.versions.tolist()):
                expected = logits_of(models[version % 3], requests[i], output).log_softmax(-1).gather(1, ids)[:, 0]
                at = output.versions == version
                assert np.allclose(output.gen_logprobs[at], expected.numpy()[at], atol=1e-4)
