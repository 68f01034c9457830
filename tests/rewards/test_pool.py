"""The pool: a failing reward costs only its own sample, and no process outlives its parent."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace as replace_struct

from hpcrl.config import Config, DataConfig, RewardConfig
from hpcrl.rewards.reward import Reward, RewardItem, Score
from hpcrl.rewards.serving.guarded import score_each_async
from hpcrl.rewards.serving.pool import RewardPool
from hpcrl.rewards.serving.protocol import LENGTH, content_of, pack_chunk, read_chunk, to_message
from hpcrl.spec.media import IMAGE, Medium
from tests.children import children

FILE = Path(__file__).with_name("user_rewards.py")


def function(name: str, **section: Any) -> RewardConfig:
    return RewardConfig(name="function", function=f"{FILE}:{name}", **{"timeout_s": 3.0, **section})


def items(responses: Sequence[str], domain: str = "d", **extra: Any) -> list[RewardItem]:
    return [RewardItem(n, domain, "p", response, "right", extra) for n, response in enumerate(responses)]


def collect(pool: RewardPool, limit_s: float = 60.0) -> dict[int, Score]:
    found: dict[int, Score] = {}
    deadline = time.monotonic() + limit_s
    while pool.pending:
        assert time.monotonic() < deadline, f"{pool.pending} responses were never scored; {found}"
        for sample_id, score in pool.poll():
            assert sample_id not in found, "scored twice"
            found[sample_id] = score
        time.sleep(0.002)
    return found


@pytest.fixture
def make_pool() -> Iterator[Any]:
    pools: list[RewardPool] = []

    def make(**sections: RewardConfig) -> RewardPool:
        pools.append(RewardPool(Config(reward=sections)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    assert not children("hpcrl.rewards.serving.worker")


def test_a_message_to_a_worker_has_each_image_once() -> None:
    """Two responses to a prompt with two images, and one to a prompt with one of these at another place."""
    large, small = Medium(IMAGE, bytes(3000), 50, 20, 4, 2), Medium(IMAGE, bytes(3), 1, 1, 9, 1)
    other = replace_struct(large, start=5)
    shown = [[large, small], [replace_struct(large), replace_struct(small)], [other], []]
    given = [replace(item, images=own) for item, own in zip(items("abcd"), shown, strict=True)]
    messages = [to_message(item) for item in given]
    assert sum(map(len, messages)) < 1000, "waiting responses are encoded without images"
    body = pack_chunk(given, messages)[LENGTH.size :]
    assert 2 * 3000 < len(body) < 2 * 3000 + 1000
    again = read_chunk(body)
    assert [[*item.images] for item in again] == shown
    assert again[0].images[0] is again[1].images[0] is not again[2].images[0]
    contents = [content_of(replace(item, response="a"), messages[0]) for item in given]
    assert contents[0] == contents[1] and len({*contents}) == 3, "equal responses have equal images"


@pytest.mark.slow
def test_each_bad_response_costs_only_itself(make_pool):
    bad = {
        "raise": "RuntimeError: two lines",
        "exit": "SystemExit: 0",
        "cancel": "CancelledError:",
        "hang": "timeout after 3 s",
        "die": "the reward's process ended with exit code 3",
        "kill": "the reward's process ended by SIGKILL",
        "nan": "the reward returned nan",
        "inf": "the reward returned inf",
        "text": "TypeError: the result is str '1.0', not a number",
        "none": "TypeError: the result is NoneType 'None', not a number",
    }
    responses = [word for name in bad for word in ("right", name, "wrong")]
    pool = make_pool(default=function("compute_score", num_processes=2))
    pool.submit(items(responses))
    assert pool.pending == len(responses)
    found = collect(pool)
    for n, response in enumerate(responses):
        place = f" (domain d, reward {FILE}:compute_score)"
        expected = {"right": Score(1.0, 1.0), "wrong": Score(0.0, 0.0)}.get(response)
        expected = expected or Score(0.0, 0.0, bad[response] + place)
        error, num_places = re.subn(r" \(user_rewards\.py:\d+\)", "", found[n].error)
        assert replace(found[n], error=error) == expected
        assert num_places == (response in ("raise", "exit", "cancel")), "what the function has raised names its line"
    stats = pool.stats()
    assert stats["scored"] == len(responses) and stats["errors"] == len(bad)
    assert stats["timeouts"] == 1 and stats["restarts"] == 3


@pytest.mark.slow
def test_failing_batched_calls_are_repeated_sample_by_sample(make_pool):
    responses = ["a", "raise", "bb", "die", "ccc", "nan", "skip", "short", "hang", "dddd"]
    pool = make_pool(default=function("trl"))
    pool.submit(items(responses, level=0))
    found = collect(pool)
    assert {responses[n]: score.reward for n, score in found.items() if not score.error} == {
        "a": 1, "bb": 2, "ccc": 3, "skip": 0, "short": 1, "dddd": 4,
    }  # fmt: skip
    assert {responses[n]: score.error.partition(" (")[0] for n, score in found.items() if score.error} == {
        "raise": "KeyError: 'level'",
        "die": "the reward's process ended with exit code 1",
        "nan": "the reward returned nan",
        "hang": "timeout after 3 s",
    }


@pytest.mark.slow
def test_children_of_a_reward_are_killed_with_it(make_pool):
    mark = 100_000 + os.getpid()
    pool = make_pool(default=function("compute_score"))
    pool.submit(items(["spawn and hang"], extra_info={"sleep": mark}))
    alive = lambda: [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", str(mark)]]  # noqa: E731
    seen = False
    while pool.pending:
        pool.poll()
        seen = seen or bool(alive())
        time.sleep(0.05)
    deadline = time.monotonic() + 20
    while alive():  # a killed process takes a moment to end
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert seen


@pytest.mark.slow
def test_polling_never_blocks_and_a_hanging_pool_can_be_closed(make_pool):
    pool = make_pool(default=function("compute_score", timeout_s=100))
    pool.submit(items(["hang", "x" * 300_000, "right"]))
    for _ in range(100):
        start = time.perf_counter()
        pool.poll()
        assert time.perf_counter() - start < 20
        time.sleep(0.01)
    pool.close()
    pool.close()


@pytest.mark.slow
def test_long_responses_are_sent_and_unserialisable_rows_are_refused(make_pool):
    pool = make_pool(default=function("compute_score", timeout_s=30))
    long = "x" * 3_000_000
    pool.submit([RewardItem(1, "d", "p", long, long), RewardItem(2, "d", "p", "right", "right", {"row": object()})])
    found = collect(pool)
    assert found[1] == Score(1.0, 1.0) and found[2].error.startswith("TypeError")


@pytest.mark.slow
def test_token_ids_reach_a_function_that_asks_for_them(make_pool):
    pool = make_pool(default=function("completion_lengths", timeout_s=30))
    pool.submit([RewardItem(1, "d", "p", "ab", token_ids=array("i", [70_000, 2]))])
    assert collect(pool) == {1: Score(70_002.0, 70_002.0)}


def siblings(group: int, *responses: str) -> list[RewardItem]:
    return [RewardItem(10 * group + n, "d", "p", response, "right") for n, response in enumerate(responses)]


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_each_group_is_scored_by_its_own_call(make_pool, num_processes: int):
    pool = make_pool(default=function("longest", num_processes=num_processes))
    assert pool.scores("d") is None, "it is being loaded"
    groups = [("a", "bbb", "cc"), ("dddd", "e"), ("raise", "f"), ("hang", "ggggggg"), ("hhhhhhhhh",)]
    for n, responses in enumerate(groups):
        pool.submit_group(siblings(n, *responses))
    assert pool.pending == 10
    found = collect(pool)
    assert pool.scores("d") == "groups"
    assert {n: score.reward for n, score in found.items() if not score.error} == {0: 0, 1: 1, 2: 0, 10: 1, 11: 0, 40: 1}
    place = f" (domain d, reward {FILE}:longest)"
    for n in (20, 21):
        assert re.fullmatch(rf"RuntimeError: no group \(user_rewards\.py:\d+\){re.escape(place)}", found[n].error)
    assert {found[n].error for n in (30, 31)} == {f"timeout after 3 s{place}"}
    assert pool.stats() == {"scored": 10, "errors": 4, "timeouts": 1, "restarts": 1, "equal": 0}


@pytest.mark.slow
def test_equal_responses_to_a_pure_reward_are_scored_once(make_pool, tmp_path: Path):
    log = tmp_path / "log"
    called = lambda: sorted(log.read_text().split())  # noqa: E731
    pool = make_pool(default=function("counted", num_processes=2))
    pool.submit(items(["right", "wrong", "raise", "right"] * 5, log=str(log)))
    found = collect(pool)
    assert called() in (["raise", "right", "wrong"], ["raise", "raise", "right", "wrong"])  # in a batch, then alone
    for n, score in found.items():
        assert score.reward == (n % 4 in (0, 3)) and ("RuntimeError" in score.error) == (n % 4 == 2)
    assert pool.stats()["equal"] == 17 and pool.stats()["errors"] == 5
    log.write_text("")
    same = items(["wrong", "right"], log=str(log))
    pool.submit(same)
    assert {n: score.reward for n, score in collect(pool).items()} == {0: 0.0, 1: 1.0} and not called()
    other_row, other_tokens = replace(same[0], answer="wrong"), replace(same[0], sample_id=1, token_ids=[1])
    pool.submit([other_row, other_tokens])
    assert {n: score.reward for n, score in collect(pool).items()} == {0: 1.0, 1: 0.0}
    assert called() == ["wrong", "wrong"]
    pool.submit(items(["raise"], log=str(log)))
    assert "RuntimeError" in collect(pool)[0].error and "raise" in called(), "an error is not kept"


@pytest.mark.slow
def test_waiting_calls_run_concurrently_and_each_bad_one_costs_only_itself(make_pool):
    pool = make_pool(default=function("judge", timeout_s=5, concurrency=70))
    responses = ["right"] * 60 + ["slow", "raise", "own timeout", "wrong"]
    pool.submit(items(["right"]))
    collect(pool)  # it has started
    start = time.monotonic()
    pool.submit(items(responses))
    found = collect(pool)
    assert time.monotonic() - start < 15, "one after the other 60 of them would take 18 s"
    assert [found[n].score for n in range(60)] == [1.0] * 60 and found[63] == Score(0.0, 0.0)
    assert [found[n].error.partition(" (")[0] for n in (60, 61, 62)] == [
        "timeout after 5 s", "RuntimeError: no service", "TimeoutError: the service's",
    ]  # fmt: skip
    assert pool.stats()["timeouts"] == 1 and pool.stats()["restarts"] == 0


@pytest.mark.slow
def test_a_call_that_blocks_the_loop_or_ends_the_process_costs_only_itself(make_pool):
    pool = make_pool(default=function("judge", concurrency=4))
    responses = ["right", "block", "right", "die", "right", "right"]
    pool.submit(items(responses))
    found = collect(pool)
    assert [found[n].score for n in (0, 2, 4, 5)] == [1.0] * 4
    assert found[1].error.startswith("timeout after 3 s (its code blocks the event loop)")
    assert found[3].error.startswith("the reward's process ended with exit code 3")


@pytest.mark.slow
def test_a_timeout_ignores_a_pause_of_the_job(tmp_path: Path):
    (tmp_path / "slow.py").write_text("import time\ndef f(items):\n    time.sleep(0.5)\n    return [1.0]\n")
    section = RewardConfig(name="function", function=f"{tmp_path}/slow.py:f", timeout_s=10)
    pause_s = 0.0
    pool = RewardPool(Config(reward={"default": section}), lambda: time.monotonic() + pause_s)
    try:
        pool.poll()
        pause_s = 1000.0  # while the worker starts
        while pool.scores("d") is None:
            assert not pool.poll()
        pool.submit(items(["x"]))
        assert not pool.poll()
        pause_s = 2000.0
        assert collect(pool) == {0: Score(1.0, 1.0)} and pool.stats()["restarts"] == 0
    finally:
        pool.close()


class Paused(Reward):
    """Its process stops within a call, as in a suspended job."""

    def __init__(self):
        pass

    async def score(self, items):
        await asyncio.sleep(0)
        time.sleep(1.0)
        await asyncio.sleep(0.05)
        return [Score(1.0, 1.0)]


@pytest.mark.slow
def test_a_timeout_of_an_asynchronous_call_ignores_a_pause_of_the_job():
    assert asyncio.run(score_each_async(Paused(), items(["x"]), 0.8)) == [Score(1.0, 1.0)]


@pytest.mark.slow
def test_no_more_calls_wait_than_the_concurrency_allows_and_groups_can_wait_too(make_pool):
    pool = make_pool(default=function("judge", timeout_s=30, concurrency=2))
    pool.submit(items(["right"] * 5))
    found = collect(pool)
    assert [found[n].score for n in range(5)] == [1.0] * 5
    groups = make_pool(default=function("judge_groups", timeout_s=30))
    groups.submit_group(siblings(1, "a", "b", "c"))
    groups.submit_group(siblings(2, "d"))
    assert {n: score.score for n, score in collect(groups).items()} == {10: 3, 11: 3, 12: 3, 20: 1}


@pytest.mark.slow
def test_domains_use_their_rewards_and_cheap_ones_are_scored_at_once(make_pool):
    pool = make_pool(a=RewardConfig(), b=RewardConfig(name="sort_digits"), default=function("native"))
    pool.submit([RewardItem(1, "a", "p", "Right", "right"), RewardItem(2, "b", "p", "1 2", "1 2")])
    assert dict(pool.poll()) == {1: Score(1.0, 1.0), 2: Score(1.0, 1.0)}
    pool.submit([RewardItem(3, "a", "p", "x", None), RewardItem(4, "else", "p", "x", "x", {}, "length")])
    found = collect(pool)
    no_answer = "ValueError: the row has no answer to compare with (data.answer_key)"
    assert found[3].error == f"{no_answer} (domain a, reward exact_match)"
    assert found[4] == Score(0.0, 0.0)


@pytest.mark.slow
def test_the_math_reward_keeps_its_time_limit_in_a_worker():
    pool = RewardPool(Config(data=DataConfig(train=str(FILE)), reward={"m": RewardConfig(name="math", timeout_s=100)}))
    try:
        pool.submit([RewardItem(n, "m", "p", rf"\boxed{{\frac{{{2 * n}}}{{6}}}}", f"#### {n}/3") for n in range(50)])
        pool.submit([RewardItem(99, "m", "p", r"\boxed{((x+y)^{30}-(x-y)^{30}+z)^{30}}", "x+1")])
        found = collect(pool)
        assert all(found[n].score == 1 for n in range(50))
        assert found[99].score == 0 and "more than 2 s of CPU time" in found[99].error
        assert [found[n].extracted for n in (1, 2)] == [r"\frac{2}{6}", r"\frac{4}{6}"]
    finally:
        pool.close()


@pytest.mark.slow
def test_a_reward_that_cannot_start_ends_the_run(make_pool):
    pool = make_pool(default=function("nothing"))
    pool.submit(items(["right"]))
    with pytest.raises(RuntimeError, match=r"reward default: .*has no nothing"):
        collect(pool)


@pytest.mark.slow
def test_a_worker_that_dies_during_its_start_is_tried_three_times(make_pool, tmp_path: Path):
    (tmp_path / "deadly.py").write_text("import os\nos._exit(7)\n")
    pool = make_pool(default=RewardConfig(name="function", function=f"{tmp_path}/deadly.py:f"))
    with pytest.raises(
        RuntimeError, match="no worker started in 3 attempts: the reward's process ended with exit code 7"
    ):
        pool.submit(items(["right"]))
        collect(pool)


@pytest.mark.slow
def test_workers_die_with_a_killed_parent(tmp_path: Path):
    code = (
        "import time; from hpcrl.config import *; from hpcrl.rewards.serving.pool import RewardPool\n"
        f"pool = RewardPool(Config(reward={{'d': RewardConfig(name='function', function='{FILE}:native')}}))\n"
        "time.sleep(1); print('up', flush=True); time.sleep(100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "up\n"
    workers = psutil.Process(parent.pid).children()
    assert len(workers) == 1
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_a_worker_imports_no_torch(tmp_path: Path):
    (tmp_path / "spy.py").write_text(
        "import sys\ndef f(items):\n    return [float('torch' in sys.modules or 'transformers' in sys.modules)]\n"
    )
    pool = RewardPool(Config(reward={"d": RewardConfig(name="function", function=f"{tmp_path}/spy.py:f")}))
    try:
        pool.submit(items(["x"]))
        assert collect(pool) == {0: Score(0.0, 0.0)}
    finally:
        pool.close()
