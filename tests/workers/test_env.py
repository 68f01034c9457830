"""The env role: a failing environment costs only its sample, and nothing of an episode remains."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hpcrl.data.env_sources import HALF, MAX_SEED
from hpcrl.data.pictures import decode
from hpcrl.envs.environment import num_chars
from hpcrl.envs.examples import example_messages
from hpcrl.messaging.messages import EndEpisodes, EnvObservation, Observed, ReadLastObservation, Turn
from hpcrl.rollout.types import episode_seed, make_sample_id, validation_uid
from hpcrl.spec.media import IMAGE, IMAGE_MARK, Medium
from hpcrl.workers import env as role_env
from hpcrl.workers.dialogue import first_prompt
from hpcrl.workers.env import EnvRole, _examples
from tests.children import runs
from tests.envs.test_remote import serving
from tests.vlm import PAD, png, seeing_tokenizer
from tests.workers import odd_env
from tests.workers.conftest import Stage
from tests.workers.test_templates import QWEN2_5, QWEN3

pytestmark = pytest.mark.usefixtures("console")

ODD = {"name": "class", "class_path": "tests.workers.odd_env:OddEnv", "max_turns": 3}
SETTINGS = {"env": {"default": ODD}}
KINDS = ("end", "shorten")
UIDS = iter(range(1, 1000))


def turn(
    sample: int,
    how: str = "",
    room: int = 100,
    reason: str = "stop",
    domain: str = "maths",
    columns: dict[str, Any] = {"hint": "left"},  # noqa: B006
) -> Turn:
    """A turn of the model; with `how` the beginning of an episode."""
    row = {"prompt": "?", "answer": how, "messages": [{"role": "user", "content": "?"}], "tools": None}
    meta = json.dumps(row | {"extra": columns}).encode()
    return Turn(sample, domain, "" if how else "4", meta, reason, 2, 2, room, bool(how))


@pytest.fixture
def role(stage: Stage) -> Iterator[EnvRole]:
    role = EnvRole(stage.worker(1, SETTINGS))
    yield role
    role.close()
    assert not odd_env.OPEN
    stage.heard()


def settle(role: EnvRole) -> None:
    """Poll until the role is idle and ended environments are closed."""
    role.poll()
    deadline = time.monotonic() + 20
    while role.busy or any(thread.name == "close" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        role.poll()
        time.sleep(0.001)


def play(stage: Stage, role: EnvRole, sent: Turn) -> Observed:
    stage.send(1, 1, [sent])
    settle(role)
    [observed] = stage.heard()
    assert isinstance(observed, Observed) and observed.sample == observed.result.sample == sent.sample
    return observed


def first_turn(stage: Stage, role: EnvRole, how: str, room: int = 100, reason: str = "stop") -> Observed:
    """The result of an episode's first turn."""
    sample = make_sample_id(next(UIDS), 0, 0)
    begun = play(stage, role, turn(sample, how))
    assert not begun.ended and not begun.result.error
    stage.deltas()
    return play(stage, role, turn(sample, room=room, reason=reason))


def test_a_validation_environment_plays_the_same_episode_in_every_evaluation(stage: Stage, role: EnvRole) -> None:
    """And its seed is one that numpy's older generators take."""
    odd_env.SEEDS.clear()
    for uid in (3, 4, validation_uid(0, 3), validation_uid(7, 3), validation_uid(7, 4)):
        for member in range(2):
            assert not play(stage, role, turn(make_sample_id(uid, 0, member), "plain")).result.error
    one, other, held_out, later, next_row = odd_env.SEEDS[::2]
    assert odd_env.SEEDS[1::2] == [one, other, held_out, later, next_row], "siblings share theirs"
    assert held_out == later and len({one, other, held_out, next_row}) == 4
    assert len(stage.deltas()) == 10


def test_training_and_validation_seeds_are_from_different_halves() -> None:
    """Like the seeds of env:DOMAIN, by which environments choose validation goals and games."""
    uids = range(100)
    assert max(episode_seed(0, uid) for uid in uids) < HALF
    assert min(episode_seed(0, validation_uid(1, uid)) for uid in uids) >= HALF
    assert max(episode_seed(0, validation_uid(1, uid)) for uid in uids) < MAX_SEED


def test_a_row_can_set_the_seed_of_its_episodes(stage: Stage, role: EnvRole) -> None:
    odd_env.SEEDS.clear()
    for uid, start in ((5, 77), (6, 77), (8, 0), (validation_uid(2, 3), 1 << 30)):
        sent = turn(make_sample_id(uid, 0, 0), "plain", columns={"hint": "left", "env_seed": start})
        assert not play(stage, role, sent).result.error
    expected = [int(np.random.RandomState(start).randint(1 << 30)) for start in (77, 77, 0, 1 << 30)]
    assert [*odd_env.SEEDS] == expected
    wrong = turn(make_sample_id(7, 0, 0), "plain", columns={"hint": "left", "env_seed": "x"})
    assert "column env_seed: 'x' is not a whole number from 0 to 2147483647" in play(stage, role, wrong).result.error


def test_numpy_numbers_are_serialised(stage: Stage, role: EnvRole) -> None:
    sample = make_sample_id(next(UIDS), 0, 0)
    play(stage, role, turn(sample, "plain"))
    stage.deltas()
    first = play(stage, role, turn(sample))
    assert (first.ended, first.result.reward, first.result.error) == (False, 0.25, "")
    [delta] = stage.deltas()
    assert delta.sample == sample and len(delta.token_ids) > 4
    second = play(stage, role, turn(sample))
    assert (second.ended, second.result.reward, second.result.score) == (True, 0.5, 1.0)
    told = {"return": 0.5, "turns": 2.0, "success": 1.0, "n": 1.0, "truncated": 0.0, "failed": 0.0}
    assert second.result.metrics == told
    assert second.result.turn_rewards == [0.25, 0.25]


LAKE = {"name": "frozen_lake", "max_turns": 6, "options": {"size": 4, "tag": ""}}

EXPERT = {"env": {"default": LAKE}, "imitation": {"expert_turns": 1.0}, "data": {"max_prompt_tokens": 200}}


@pytest.mark.parametrize("runs_in", ["thread", "process"])
def test_an_expert_plays_turns_of_training_episodes(stage: Stage, runs_in: str) -> None:
    """With share 1 it walks to the goal; validation episodes are the policy's."""
    role = EnvRole(stage.worker(1, EXPERT | {"env": {"default": LAKE | {"runs_in": runs_in}}}))
    sample, held_out = make_sample_id(next(UIDS), 0, 0), make_sample_id(validation_uid(0, 1), 0, 0)
    for each in (sample, held_out):
        assert not play(stage, role, turn(each, "begin", room=300)).result.error
    said = {delta.sample: delta.expert for delta in stage.deltas()}
    assert said[held_out] == "" and said[sample] in ("Left", "Right", "Up", "Down")
    text, steps = said[sample], 0
    while text:
        observed = play(stage, role, msgspec.structs.replace(turn(sample, room=300), text=text))
        steps += 1
        text = next((delta.expert for delta in stage.deltas()), "")
    assert observed.ended and observed.result.metrics["success"] == 1.0 and steps > 0
    role.close()


def test_an_expert_that_fails_ends_only_its_episode(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    role = EnvRole(stage.worker(1, EXPERT))
    for found, error in (("", "expert() must return a text, but returned ''"), (None, "returned None")):
        monkeypatch.setattr(role_env, "expert_response", lambda env, seed, found=found: found)
        observed = play(stage, role, turn(make_sample_id(next(UIDS), 0, 0), "begin"))
        assert observed.ended and error in observed.result.error
    role.close()


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("raises", "environment class: KeyError: "),
        ("is cancelled", "environment class: CancelledError: (odd_env.py:"),
        ("is interrupted", "environment class: KeyboardInterrupt: (odd_env.py:"),
        ("no text", "environment class: TypeError: the observation is not text but dict"),
        ("lone surrogate", "environment class: TypeError: the observation is no valid Unicode: 'utf-8' codec can't"),
        ("no number", "environment class: ValueError: could not convert string to float: 'much'"),
        ("nan", "environment class: ValueError: step() returned reward=nan, which is not a number"),
        ("endless metric", "environment class: ValueError: step() returned success=inf, which is not a number"),
        ("huge", "environment class: ValueError: after step() reward=1e+39; at most 1e+30 is possible"),
        (
            "forgets",
            "environment class: TypeError: step() must return (observation, reward, terminated, truncated, info), but "
            "returned 4 values",
        ),
        ("no info", "environment class: TypeError: step() must return a mapping as info, but returned list"),
    ],
)
def test_a_failing_environment_costs_only_its_sample(stage: Stage, role: EnvRole, how: str, error: str) -> None:
    observed = first_turn(stage, role, how)
    assert observed.ended and observed.result.reward == 0.0
    assert observed.result.error.startswith(error) and len(observed.result.error) < 3000
    assert observed.result.metrics.pop("turns") in (0.0, 1.0)
    assert observed.result.metrics == {"success": 0.0, "return": 0.0, "failed": 1.0}, "or only survivors would count"
    other = first_turn(stage, role, "plain")
    assert not other.ended and not other.result.error


@pytest.mark.parametrize("how", ["odd name", "no images"])
def test_unusual_but_valid_step_results_are_accepted(stage: Stage, role: EnvRole, how: str) -> None:
    observed = first_turn(stage, role, how)
    assert not observed.ended and not observed.result.error and observed.result.reward == 0.5


def test_an_observation_that_does_not_fit_ends_the_episode_with_the_reward_so_far(stage: Stage, role: EnvRole) -> None:
    observed = first_turn(stage, role, "long", room=900)
    assert observed.ended and observed.result.reward == 0.25
    assert " tokens is too long, there is room for 900" in observed.result.error
    roomy = first_turn(stage, role, "long", room=10_000)
    assert not roomy.ended and not roomy.result.error


@pytest.mark.parametrize("episode", ["trajectory", "steps"])
def test_an_observation_that_does_not_fit_is_shortened_if_configured(stage: Stage, episode: str) -> None:
    """The first observation too, where the row's other messages are kept."""
    env = {**ODD, "long_observation": "shorten", "episode": episode, "history": 0}
    role = EnvRole(stage.worker(1, {"env": {"default": env}}))
    tokenizer, _ = role._worker.tokenizer, stage.deltas()
    for how, turns in (("long board", 1), ("long", 2)):
        sample = make_sample_id(next(UIDS), 0, 0)
        for sent in (turn(sample, how), turn(sample))[:turns]:
            observed = play(stage, role, sent)
            assert not observed.ended and not observed.result.error
            [delta] = stage.deltas()
        ids, [told] = np.frombuffer(delta.token_ids, np.int32), json.loads(delta.messages)
        assert 90 < len(ids) <= 100, "as much as there is room for"
        assert tokenizer.decode(ids).endswith(f"\n{told['content']}<|im_end|>\n<|im_start|>assistant\n")
        before, after = told["content"].split(" characters left out]\n")
        assert before.startswith("again again ") and after.endswith("again again ")
    role.close()
    stage.heard()


@pytest.mark.parametrize("how", ["endless", "endless tool", "endless name", "endless dialogue"])
def test_an_observation_that_cannot_fit_is_not_tokenised(
    stage: Stage, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenising it would delay all other episodes of the rank."""
    ends, shortens = (
        EnvRole(stage.worker(1, {"env": {"default": {**ODD, "long_observation": what}}})) for what in KINDS
    )
    shown: list[int] = []
    encode = role_env.encode_observation

    def noted(tokenizer: Any, messages: Any, *rest: Any) -> Any:
        shown.append(num_chars(messages))
        return encode(tokenizer, messages, *rest)

    monkeypatch.setattr(role_env, "encode_observation", noted)
    observed = first_turn(stage, ends, how)
    assert observed.ended and observed.result.reward == 0.25 and observed.result.metrics["failed"] == 0.0
    assert re.search(
        r"an observation of \d{6,} characters is too long, there is room for 100 tokens", observed.result.error
    )
    assert not shown
    observed = first_turn(stage, shortens, how)
    assert observed.ended is (how in ("endless name", "endless dialogue")), "only contents are shortened"
    assert max(shown, default=0) < 10_000
    for role in (ends, shortens):
        role.close()
    stage.deltas()


def test_an_empty_observation_is_an_empty_message_or_no_message(stage: Stage, role: EnvRole) -> None:
    told = {"empty": "user\n<|im_end|>\n<|im_start|>", "no message": ""}
    for how, text in told.items():
        observed = first_turn(stage, role, how)
        assert not observed.ended and not observed.result.error
        [delta] = stage.deltas()
        ids = np.frombuffer(delta.token_ids, np.int32)
        assert role._worker.tokenizer.decode(ids) == f"\n<|im_start|>{text}assistant\n"
        assert play(stage, role, turn(observed.sample)).ended


def test_a_response_truncated_by_its_length_ends_the_episode(stage: Stage, role: EnvRole) -> None:
    observed = first_turn(stage, role, "plain", reason="length")
    assert observed.ended and not observed.result.error and observed.result.metrics["truncated"] == 1.0


@pytest.mark.slow
def test_an_episode_ends_at_its_limits_of_tokens_and_seconds(stage: Stage) -> None:
    envs = {"tokens": {**ODD, "max_tokens": 10}, "seconds": {**ODD, "max_seconds": 3.0}, "default": None}
    role = EnvRole(stage.worker(1, {"env": envs}))
    for domain in ("tokens", "seconds"):
        sample = make_sample_id(next(UIDS), 0, 0)
        play(stage, role, turn(sample, "plain", domain=domain))
        first = play(stage, role, msgspec.structs.replace(turn(sample, domain=domain), num_written_tokens=9))
        assert not first.ended and "truncated" not in first.result.metrics
        end = time.monotonic() + 3.2 * (domain == "seconds")
        while time.monotonic() < end:  # as a rank that waits for mail does
            role.poll()
            time.sleep(0.05)
        last = play(stage, role, msgspec.structs.replace(turn(sample, domain=domain), num_written_tokens=10))
        assert last.ended and not last.result.error
        assert last.result.reward == 0.5 and last.result.metrics["turns"] == 2.0
    stage.deltas()
    role.close()


@pytest.mark.parametrize("how", ["plain", "close"])
def test_episodes_of_dropped_samples_are_closed(stage: Stage, role: EnvRole, how: str) -> None:
    samples = [make_sample_id(next(UIDS), 0, member) for member in range(3)]
    stage.send(1, 1, [turn(sample, how) for sample in samples])
    settle(role)
    assert len(odd_env.OPEN) == 3
    stage.heard()
    # In order of the mail: the last turn of the first sample is played and answered before it is dropped.
    stage.send(1, 1, [turn(samples[0]), *(turn(s, reason="abort") for s in samples[:2])])
    settle(role)
    assert len(odd_env.OPEN) == 1
    assert [event.sample for event in stage.heard()] == [samples[0]]
    stage.send(1, 1, [turn(make_sample_id(next(UIDS), 0, 0), reason="abort")])  # one that it never had
    assert role.poll() and not stage.heard()


def test_episodes_of_a_lost_generator_are_closed_and_its_late_turns_ignored(stage: Stage, role: EnvRole) -> None:
    first, second, third = (make_sample_id(next(UIDS), 0, 0) for _ in range(3))
    own = msgspec.structs.replace(turn(make_sample_id(next(UIDS), 0, 0), "plain"), reply_to=1)
    stage.send(1, 1, [turn(first, "plain"), turn(second, "plain"), own])
    settle(role)
    assert len(odd_env.OPEN) == 3
    stage.send(1, 1, [turn(second)])
    role.poll()  # its turn is at work now
    role.handlers()[EndEpisodes](EndEpisodes(2), 0)
    settle(role)
    assert len(odd_env.OPEN) == 1 and len(stage.mail(1, EnvObservation)) == 1, "the episode of another rank goes on"
    stage.heard()
    stage.send(1, 1, [turn(third, "plain")])
    settle(role)
    assert len(odd_env.OPEN) == 1 and not stage.heard()


def test_a_hanging_close_does_not_block_other_episodes(stage: Stage) -> None:
    role, odd_env.RELEASE = EnvRole(stage.worker(1, SETTINGS)), threading.Event()
    hangs, other = make_sample_id(next(UIDS), 0, 0), make_sample_id(next(UIDS), 0, 0)
    stage.send(1, 1, [turn(hangs, "closes slowly"), turn(other, "plain")])
    settle(role)
    stage.send(1, 1, [turn(hangs, reason="abort"), turn(other)])
    role.poll()
    deadline = time.monotonic() + 20
    while role.busy:
        assert time.monotonic() < deadline
        role.poll()
    assert len(stage.heard()) == 3 and len(odd_env.OPEN) == 2
    odd_env.RELEASE.set()
    role.close()
    stage.deltas()
    assert not odd_env.OPEN


@pytest.mark.slow
def test_environments_wait_concurrently_and_a_hanging_one_costs_its_sample(stage: Stage) -> None:
    settings = {"env": {"default": {**ODD, "num_threads": 3, "timeout_s": 3.0}}}
    role, odd_env.RELEASE = EnvRole(stage.worker(1, settings)), threading.Event()
    together, hangs = [make_sample_id(next(UIDS), 0, 0) for _ in range(2)], make_sample_id(next(UIDS), 0, 0)
    later = make_sample_id(next(UIDS), 0, 0)
    stage.send(1, 1, [turn(hangs, "hangs"), turn(later, "plain"), *(turn(sample, "meets") for sample in together)])
    settle(role)
    assert not any(event.ended for event in stage.heard())
    stage.send(1, 1, [turn(sample) for sample in (hangs, *together, later)])
    settle(role)
    heard = {event.sample: event for event in stage.heard()}
    assert all(not heard[sample].ended for sample in (*together, later))  # each of the two waited for the other
    assert heard[hangs].ended and heard[hangs].result.reward == 0.0
    assert heard[hangs].result.error == "environment class: step() did not return within 3 s (env.default.timeout_s)"
    stage.send(1, 1, [turn(sample) for sample in together])  # the thread that hangs takes no place
    settle(role)
    assert [event.ended for event in stage.heard()] == [True, True]
    stage.send(1, 1, [turn(hangs, reason="abort")])
    settle(role)
    assert len(odd_env.OPEN) == 2, "an environment is not closed while it is at work"
    odd_env.RELEASE.set()
    role.close()
    stage.deltas()
    deadline = time.monotonic() + 20
    while odd_env.OPEN:  # the one that hung is closed by its thread
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_an_endless_computation_is_interrupted(stage: Stage) -> None:
    role = EnvRole(stage.worker(1, {"env": {"default": {**ODD, "timeout_s": 3.0}}}))
    computes = make_sample_id(next(UIDS), 0, 0)
    assert not play(stage, role, turn(computes, "computes")).ended
    ended = play(stage, role, turn(computes))
    assert ended.ended and "step() did not return within 3 s" in ended.result.error
    deadline = time.monotonic() + 20
    while odd_env.OPEN:  # its thread closes it
        assert time.monotonic() < deadline
        role.poll()
        time.sleep(0.01)
    assert not any(thread.name == "environment" for thread in threading.enumerate())
    role.close()
    stage.deltas()


@pytest.mark.slow
def test_all_coroutines_run_concurrently_and_a_hanging_one_is_cancelled(stage: Stage) -> None:
    waiting = {**ODD, "class_path": "tests.workers.odd_env:Waiting", "timeout_s": 3.0}
    role, odd_env.TOGETHER = EnvRole(stage.worker(1, {"env": {"default": waiting}})), odd_env.Rendezvous(20)
    together, hangs = [make_sample_id(next(UIDS), 0, 0) for _ in range(20)], make_sample_id(next(UIDS), 0, 0)
    stage.send(1, 1, [turn(hangs, "hangs"), *(turn(sample, "meets") for sample in together)])
    settle(role)
    assert len(stage.heard()) == 21 and len(odd_env.OPEN) == 21
    stage.send(1, 1, [turn(sample) for sample in (hangs, *together)])
    settle(role)
    heard = {event.sample: event for event in stage.heard()}
    assert not any(heard[sample].ended or heard[sample].result.error for sample in together)
    assert "step() did not return within 3 s" in heard[hangs].result.error
    role.close()
    stage.deltas()
    assert not odd_env.OPEN, "the cancelled one is closed, too"


def test_coroutines_in_a_thread_without_a_loop_get_a_helpful_error(stage: Stage) -> None:
    waiting = {**ODD, "class_path": "tests.workers.odd_env:Waiting", "runs_in": "thread"}
    role = EnvRole(stage.worker(1, {"env": {"default": waiting}}))
    begun = play(stage, role, turn(make_sample_id(next(UIDS), 0, 0), "plain"))
    assert begun.ended and "its methods are coroutines; use env.default.runs_in=task" in begun.result.error
    role.close()


@pytest.mark.slow
def test_a_hanging_episode_in_a_process_is_killed(stage: Stage, tmp_path: Path) -> None:
    rough = {**ODD, "class_path": "tests.envs.rough_env:RoughEnv", "runs_in": "process", "timeout_s": 3.0}
    role = EnvRole(stage.worker(1, {"env": {"default": {**rough, "num_threads": 3}}}))
    samples = {how: make_sample_id(next(UIDS), 0, 0) for how in ("hangs", "exits", "plain")}
    stage.send(1, 1, [turn(i, how, columns={"folder": str(tmp_path)}) for how, i in samples.items()])
    settle(role)
    assert not any(event.ended for event in stage.heard())
    stage.send(1, 1, [turn(sample) for sample in samples.values()])
    settle(role)
    heard = {event.sample: event.result for event in stage.heard()}
    assert "step() did not return within 3 s" in heard[samples["hangs"]].error
    assert heard[samples["exits"]].error.endswith("class: the environment's process has ended")
    assert heard[samples["plain"]].reward == 0.25 and heard[samples["plain"]].metrics["success"] == 1.0
    pids = [int(word) for word in (tmp_path / "started").read_text().split()]
    deadline = time.monotonic() + 20
    while any(map(runs, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    role.close()
    stage.deltas()


@pytest.mark.slow
def test_an_environment_that_times_out_or_is_made_too_late_is_closed(stage: Stage) -> None:
    settings = {"env": {"default": {**ODD, "timeout_s": 3.0}}}
    role, odd_env.RELEASE = EnvRole(stage.worker(1, settings)), threading.Event()
    own = first_turn(stage, role, "times out")
    assert own.ended and "TimeoutError: the server" in own.result.error and not odd_env.OPEN
    late = play(stage, role, turn(make_sample_id(next(UIDS), 0, 0), "is made slowly"))
    assert late.ended and "env.default.timeout_s" in late.result.error and not odd_env.OPEN
    odd_env.RELEASE.set()
    deadline = time.monotonic() + 20
    while odd_env.MADE_LATE != ["made", "closed"]:
        assert time.monotonic() < deadline, odd_env.MADE_LATE
        time.sleep(0.01)
    role.close()


@pytest.mark.slow
def test_the_timeout_of_a_turn_ignores_a_pause_of_the_job(stage: Stage) -> None:
    settings = {"env": {"default": {**ODD, "timeout_s": 2.5}}}
    role, odd_env.RELEASE = EnvRole(stage.worker(1, settings)), threading.Event()
    sample = make_sample_id(next(UIDS), 0, 0)
    assert not play(stage, role, turn(sample, "hangs")).ended
    stage.send(1, 1, [turn(sample)])
    role.poll()
    assert role.busy
    time.sleep(2.7)  # the clock is not read, as in a suspended job
    assert not role.poll()
    odd_env.RELEASE.set()
    settle(role)
    [played] = stage.heard()
    assert not played.result.error and not played.ended
    role.close()
    stage.deltas()
    assert not odd_env.OPEN


def test_observations_are_tokenised_with_the_template(stage: Stage, role: EnvRole) -> None:
    tokenizer = stage.worker(1, SETTINGS).tokenizer
    stage.deltas()
    first_turn(stage, role, "plain")
    [delta] = stage.deltas()
    text = tokenizer.decode(np.frombuffer(delta.token_ids, dtype=np.int32))
    assert text == "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"


def test_the_first_observation_is_the_prompt_and_row_columns_are_passed_on(stage: Stage, role: EnvRole) -> None:
    sample = make_sample_id(next(UIDS), 0, 0)
    begun = play(stage, role, turn(sample, "board"))
    assert not begun.ended and not begun.result.error
    [delta] = stage.deltas()
    assert json.loads(delta.messages) == [{"role": "user", "content": "go left"}]
    tokenizer = stage.worker(1, SETTINGS).tokenizer
    text = tokenizer.decode(np.frombuffer(delta.token_ids, dtype=np.int32))
    assert text == "<|im_start|>user\ngo left<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("how", "error", "failed"),
    [
        ("does not begin", "OSError: no game", 1.0),
        ("begins oddly", "TypeError: reset() must return (observation, info), but returned str", 1.0),
        ("long board", "is too long, there is room for 100 tokens", 0.0),
    ],
)
def test_an_episode_that_cannot_begin_costs_only_its_sample(
    stage: Stage, role: EnvRole, how: str, error: str, failed: float
) -> None:
    begun = play(stage, role, turn(make_sample_id(next(UIDS), 0, 0), how))
    assert begun.ended and begun.result.reward == 0.0 and error in begun.result.error
    assert begun.result.metrics == {"success": 0.0, "return": 0.0, "turns": 0.0, "failed": failed}


@pytest.mark.slow
def test_domains_have_separate_environments_and_threads(stage: Stage) -> None:
    """One is full and does not delay the other; an episode that also gets a reward reports this at its end."""
    envs = {"maths": {**ODD, "max_turns": 1, "add_reward": True}, "default": {**ODD, "timeout_s": 3.0}}
    envs["default"]["num_threads"] = 1
    role, odd_env.RELEASE = EnvRole(stage.worker(1, {"env": envs})), threading.Event()
    hangs, waits, scored = (make_sample_id(next(UIDS), 0, 0) for _ in range(3))
    for sample, how, domain in ((hangs, "hangs", "code"), (waits, "plain", "code"), (scored, "plain", "maths")):
        assert not play(stage, role, turn(sample, how, domain=domain)).ended
    stage.send(1, 1, [turn(hangs, domain="code"), turn(waits, domain="code"), turn(scored, domain="maths")])
    settle(role)
    first, second, third = stage.heard()
    assert (first.sample, first.ended, first.add_reward, first.result.reward) == (scored, True, True, 0.25)
    assert (second.sample, second.ended, second.add_reward) == (hangs, True, False)
    assert "env.default.timeout_s" in second.result.error and second.result.metrics["failed"] == 1.0
    assert (third.sample, third.ended) == (waits, False)
    odd_env.RELEASE.set()
    role.close()
    stage.deltas()
    deadline = time.monotonic() + 20
    while odd_env.OPEN:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_tools_are_in_the_prompt_and_their_results_in_the_next_turn(stage: Stage) -> None:
    options = {"tools": ["calculator"], "max_result_chars": 64}
    role = EnvRole(stage.worker(1, {"env": {"default": {"name": "tools", "options": options, "max_turns": 3}}}))
    tokenizer, sample = role._worker.tokenizer, make_sample_id(next(UIDS), 0, 0)
    begun = play(stage, role, turn(sample, "plain", room=1000))
    assert not begun.ended and not begun.result.error
    [delta] = stage.deltas()
    prompt = tokenizer.decode(np.frombuffer(delta.token_ids, np.int32))
    assert '"name": "calculator"' in prompt and prompt.endswith("user\n?<|im_end|>\n<|im_start|>assistant\n")
    called = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'
    first = play(stage, role, msgspec.structs.replace(turn(sample), text=called))
    assert not first.ended and first.result.metrics["tool_calls"] == 1.0
    [delta] = stage.deltas()
    said = tokenizer.decode(np.frombuffer(delta.token_ids, np.int32))
    assert said == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    last = play(stage, role, turn(sample))
    assert last.ended and not last.result.error and last.result.metrics["turns"] == 2.0
    role.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"class_path": "tests.workers.odd_env:MarkedEcho"}, "<call>4"),
        ({"class_path": "tests.workers.odd_env:MarkedEcho", "runs_in": "process"}, "<call>4"),
        ({"class_path": "tests.workers.odd_env:Echo"}, "4"),
    ],
)
def test_special_tokens_are_passed_to_environments_that_ask_for_them(stage: Stage, environment: Any, said: str) -> None:
    role = EnvRole(stage.worker(1, {"env": {"default": {**ODD, **environment}}}))
    sample = make_sample_id(next(UIDS), 0, 0)
    play(stage, role, turn(sample, "echo"))
    stage.deltas()
    play(stage, role, msgspec.structs.replace(turn(sample), text_with_special_tokens="<call>4"))
    [delta] = stage.deltas()
    assert json.loads(delta.messages) == [{"role": "user", "content": said}]
    role.close()


def test_the_last_observation_of_a_validation_episode_is_kept_for_the_evaluation(stage: Stage, role: EnvRole) -> None:
    own, other = (make_sample_id(uid, 0, 0) for uid in (validation_uid(0, 1), next(UIDS)))
    for sample in (own, other):
        play(stage, role, turn(sample, "plain"))
        for ended in (False, True):
            assert play(stage, role, turn(sample)).ended is ended
    handler = role.handlers()[ReadLastObservation]
    asked = ReadLastObservation([own, other, make_sample_id(validation_uid(0, 2), 0, 0)])
    assert handler(asked, 7).texts == ['[{"role": "user", "content": "again"}]', "", ""]
    assert handler(asked, 8).texts == ["", "", ""], "kept for one evaluation"
    play(stage, role, turn(own, "endless at the end"))
    play(stage, role, turn(own))
    assert play(stage, role, turn(own)).ended
    [kept, *_] = handler(asked, 8).texts
    assert kept.startswith('[{"role": "user", "content": "again again ') and 100_000 < len(kept) < 101_000
    play(stage, role, turn(own, "an object at the end"))
    play(stage, role, turn(own))
    assert not play(stage, role, turn(own)).result.error
    assert handler(asked, 9).texts == ["", "", ""], "what is no JSON is not kept"
    stage.deltas()


def test_by_steps_the_next_prompt_contains_tools_and_their_results(stage: Stage) -> None:
    env = {"name": "tools", "options": {"tools": ["calculator"]}, "max_turns": 3, "episode": "steps", "history": 1}
    role, sample = EnvRole(stage.worker(1, {"env": {"default": env}})), make_sample_id(next(UIDS), 0, 0)
    play(stage, role, turn(sample, "plain", room=1000))
    [first] = stage.deltas()
    called = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'
    assert not play(stage, role, msgspec.structs.replace(turn(sample, room=1000), text=called)).result.error
    [second] = stage.deltas()
    before, after = (role._worker.tokenizer.decode(np.frombuffer(d.token_ids, np.int32)) for d in (first, second))
    said = "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert '"name": "calculator"' in before and after == before + called + said
    role.close()


@pytest.mark.parametrize("history", [0, 1])
def test_by_steps_the_whole_next_prompt_is_sent_instead_of_an_extension(stage: Stage, history: int) -> None:
    settings = {"env": {"default": {**ODD, "episode": "steps", "history": history}}}
    role, (sample, other) = EnvRole(stage.worker(1, settings)), (make_sample_id(next(UIDS), 0, 0) for _ in range(2))
    decode, texts, said = role._worker.tokenizer.decode, [], ""
    for sent in (turn(sample, "board"), turn(sample)):
        assert not play(stage, role, sent).result.error
        [delta] = stage.deltas()
        texts.append(decode(np.frombuffer(delta.token_ids, dtype=np.int32)))
        said = json.loads(delta.messages)[-1]["content"]
    middle = "<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n" if history else "\n\n"
    head, last = "<|im_start|>user\ngo left", "<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [head + last, head + middle + said + last]
    play(stage, role, turn(other, "board"))
    tight = play(stage, role, turn(other, room=3))
    assert tight.ended and " tokens is too long, there is room for 3" in tight.result.error
    assert tight.result.error.startswith("environment class: a prompt of ")
    role.close()
    stage.deltas()


@pytest.mark.slow
def test_waiting_turns_run_concurrently_by_default(stage: Stage) -> None:
    """One after the other, 32 turns of .875 s took 28 s; a turn that computes still blocks the others."""
    role = EnvRole(stage.worker(1, {"env": {"default": ODD | {"timeout_s": 60.0}}}))
    samples = [make_sample_id(next(UIDS), 0, 0) for _ in range(32)]
    stage.send(1, 1, [turn(sample, "naps") for sample in samples])
    settle(role)
    stage.deltas()
    began = time.monotonic()
    stage.send(1, 1, [turn(sample) for sample in samples])
    settle(role)
    assert time.monotonic() - began < 14.0
    assert sum(isinstance(event, Observed) and not event.result.error for event in stage.heard()) == 64
    busy = [make_sample_id(next(UIDS), 0, 0) for _ in range(2)]
    stage.deltas()
    stage.send(1, 1, [turn(sample, "works") for sample in busy])
    settle(role)
    odd_env.AT_WORK.clear()
    stage.send(1, 1, [turn(sample) for sample in busy])
    settle(role)
    assert odd_env.AT_WORK == ["begins", "ends", "begins", "ends"]
    role.close()
    stage.heard()
    stage.deltas()


def test_text_around_an_observation_in_info_is_shown(
    stage: Stage, role: EnvRole, capsys: pytest.CaptureFixture[str]
) -> None:
    """GEM's games put their board there. Text that is not shown is named once."""
    sample = make_sample_id(next(UIDS), 0, 0)
    play(stage, role, turn(sample, "around"))
    [first] = stage.deltas()
    assert json.loads(first.messages) == [{"role": "user", "content": "Game. go \nP__"}]
    play(stage, role, turn(sample))
    [second] = stage.deltas()
    assert json.loads(second.messages) == [{"role": "user", "content": "Moved.\n_P_"}]
    play(stage, role, turn(sample))
    assert capsys.readouterr().out.count("env.default: nobody sees admissible_commands of info") == 1
    sample = make_sample_id(next(UIDS), 0, 0)
    play(stage, role, turn(sample, "around messages"))
    play(stage, role, turn(sample))
    shown = json.loads(stage.deltas()[-1].messages)
    assert [message["content"] for message in shown] == ["1 a", "b\n2"]
    play(stage, role, turn(sample))


def test_an_episode_that_fills_its_sequence_is_truncated_without_an_error(stage: Stage) -> None:
    limited = {"env": {"default": ODD | {"max_sequence_tokens": 900}}, "data": {"max_prompt_tokens": 400}}
    role = EnvRole(stage.worker(1, limited | {"rollout": {"max_new_tokens": 100}}))
    full = first_turn(stage, role, "long", room=300)
    assert full.ended and not full.result.error and not full.failed and full.result.reward == 0.25
    assert (full.result.metrics["truncated"], full.result.metrics["sequence_full"]) == (1.0, 1.0)
    sample = make_sample_id(next(UIDS), 0, 0)
    for sent in (turn(sample, "plain"), turn(sample), turn(sample)):
        other = play(stage, role, sent)
    assert other.ended and (other.result.metrics["truncated"], other.result.metrics["sequence_full"]) == (0.0, 0.0)
    begins = play(stage, role, turn(make_sample_id(next(UIDS), 0, 0), "long board", room=300))
    assert "is too long, there is room for 300" in begins.result.error, "no turn was played"
    role.close()
    stage.deltas()


@pytest.mark.parametrize(("how", "success", "truncated"), [("is over", 1.0, 0.0), ("is cut", 0.0, 1.0)])
def test_a_reset_can_end_the_episode(stage: Stage, role: EnvRole, how: str, success: float, truncated: float) -> None:
    over = play(stage, role, turn(make_sample_id(next(UIDS), 0, 0), how))
    assert over.ended and not over.result.error and not over.failed and not stage.deltas()
    assert (over.result.score, over.result.metrics["truncated"]) == (success, truncated)


@pytest.mark.parametrize("long_observation", ["shorten", "end"])
def test_images_of_a_game_reach_the_generator(
    stage: Stage, long_observation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"show": "image", "size": 3, "prompt": "{observation}", "turn": "{observation}", "tag": ""}
    env = {"name": "frozen_lake", "options": options, "max_turns": 2, "long_observation": long_observation}
    worker = stage.worker(1, {"data": {"max_prompt_tokens": 500}, "env": {"default": env}})
    worker.tokenizer = seeing_tokenizer()
    role, sample = EnvRole(worker), make_sample_id(next(UIDS), 0, 0)
    assert not play(stage, role, turn(sample, "plain", 400)).result.error
    [delta] = stage.deltas()
    (image,) = delta.media
    ids = np.frombuffer(delta.token_ids, np.int32)
    assert (image.width, image.height, image.length) == (84, 84, 9) and (ids == PAD).sum() == 9
    assert (ids[image.start : image.start + 9] == PAD).all() and json.loads(delta.messages)[0]["content"] == IMAGE_MARK
    # After the last turn, a validation episode's picture is kept for its page.
    own = make_sample_id(validation_uid(0, 1), 0, 0)
    play(stage, role, turn(own, "plain", 400))
    for ended in (False, True):
        assert play(stage, role, turn(own, room=400)).ended is ended
    asked = ReadLastObservation([own, sample])
    kept = role._ends[own]
    last = role.handlers()[ReadLastObservation](asked, 7)
    [message] = json.loads(last.texts[0])
    assert message["content"].startswith("Turn 3, 0 left:\n<image>") and last.texts[1] == ""
    ((picture,), others) = last.media
    assert others == () and len(kept.pictures[0].content) < len(picture.content) == 84 * 84 * 3
    assert picture.content == stage.deltas()[-1].media[0].content, "an invalid action changes nothing"
    monkeypatch.setattr(role_env, "LAST_PIXEL_BYTES", 84 * 84 * 3)
    role._ends = {own: kept, sample: kept}
    assert [len(shown) for shown in role.handlers()[ReadLastObservation](asked, 8).media] == [1, 0]
    monkeypatch.setattr(role_env, "MAX_PIXEL_BYTES", 3 * 84 * 84 - 1)
    ended = play(stage, role, turn(make_sample_id(next(UIDS), 0, 0), "plain", 400))
    assert ended.ended and "have 0.0 MiB of pixels, at most 0 are sent" in ended.result.error
    role._end(sample)
    role.close()


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (png(1)[:-30], "it cannot be decoded"),
        (b"", "must be a file's path, a data URL, or bytes"),
        (b"hello", "the content begins like none of png, jpg"),
        ("gone.png", "gone.png cannot be read: No such file or directory"),
        ("https://example.org/a.png", "would have to be downloaded"),
        (png(1, 201, 1), "the longer side may be 200 times the shorter one"),
        (3, "int is not a path, a data URL, bytes, a PIL image or a numpy array"),
    ],
    ids=["cut off", "empty", "text", "missing", "elsewhere", "long", "number"],
)
def test_a_broken_image_of_an_environment_costs_its_sample(
    stage: Stage, image: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = stage.worker(1, SETTINGS)
    worker.tokenizer = seeing_tokenizer()
    role = EnvRole(worker)
    monkeypatch.setattr(odd_env, "IMAGES", [image])
    ended = first_turn(stage, role, "an image")
    assert ended.ended and "images[0] of a message" in ended.result.error and problem in ended.result.error
    monkeypatch.setattr(odd_env, "IMAGES", [png(1)])
    assert not first_turn(stage, role, "an image").result.error, "the role goes on"
    assert len(stage.deltas()[-1].media) == 1
    role.close()
    stage.heard()


def test_a_rows_picture_in_parts_is_one_image_of_the_environment() -> None:
    parts = [msgspec.structs.replace(Medium(IMAGE, bytes(12), 2, 2), row=1, column=n) for n in (1, 2)]
    sent = msgspec.structs.replace(turn(1, "plain"), media=(*parts, Medium(IMAGE, bytes([7] * 12), 2, 2)))
    (file,) = role_env._row(sent)["extra"]["images"]
    assert decode(file).getpixel((0, 0)) == (7, 7, 7)


def test_examples_of_a_game_with_images_precede_its_prompt(stage: Stage) -> None:
    """Two examples, then the game's own board."""
    options = {"show": "image", "size": 3, "prompt": "{observation}", "turn": "{observation}", "tag": ""}
    env = {"name": "frozen_lake", "options": options, "max_turns": 2, "examples": 2}
    worker = stage.worker(1, {"data": {"max_prompt_tokens": 900}, "env": {"default": env}})
    worker.tokenizer = seeing_tokenizer()
    told = example_messages(worker.config.env["default"], "default", worker.config.seed)
    found = _examples(worker, "default", worker.config.env["default"])
    media = [medium for message in found for medium in message.get("images", ())]
    assert len(media) == sum(len(message.get("images", ())) for message in told) >= 2
    board = [{"role": "user", "content": "<image>", "images": [png(9)]}]
    row = {"messages": [{"role": "user", "content": "start"}], "tools": None}
    prompt = first_prompt(worker.tokenizer, row, board, examples=found)
    assert [medium.content for medium in prompt.media[:-1]] == [medium.content for medium in media]
    assert prompt.token_ids.tolist().count(PAD) == sum(medium.length for medium in prompt.media)


@pytest.mark.parametrize("episode", ["trajectory", "steps"])
def test_examples_precede_the_first_prompt(stage: Stage, episode: str) -> None:
    env = {"name": "guess", "options": {"high": 8, "tag": ""}, "max_turns": 2, "examples": 2, "episode": episode}
    env |= {"history": 0} if episode == "steps" else {}
    settings = {"env": {"default": env}, "data": {"max_prompt_tokens": 1000}}
    role = EnvRole(stage.worker(1, settings))
    tokenizer, room = role._worker.tokenizer, 1000
    examples = example_messages(role._config.env["default"], "default", role._config.seed)
    last = [{"role": "user", "content": "Find the number, which is between 1 and 8. Give a number from 1 to 8 in each "
             "answer, as in 1. Turns left: 2."}]  # fmt: skip
    expected = tokenizer.apply_chat_template([*examples, *last], tokenize=False, add_generation_prompt=True)
    uid = next(UIDS)
    for member in range(2):
        assert not play(stage, role, turn(make_sample_id(uid, member, 0), "plain", room)).result.error
        [delta] = stage.deltas()
        assert tokenizer.decode(np.frombuffer(delta.token_ids, np.int32)) == expected
        assert json.loads(delta.messages) == [*examples, *last]
    next_turn = msgspec.structs.replace(turn(make_sample_id(uid, 0, 0), room=room), text="no number")
    assert not play(stage, role, next_turn).result.error
    [delta] = stage.deltas()
    prompt = tokenizer.apply_chat_template(examples, tokenize=False)
    assert tokenizer.decode(np.frombuffer(delta.token_ids, np.int32)).startswith(prompt) == (episode == "steps")
    tight = play(stage, role, turn(make_sample_id(next(UIDS), 0, 0), "plain", room=9))
    assert tight.ended and "a prompt with 2 examples (env.default.examples) of " in tight.result.error
    role.close()
    with pytest.raises(ValueError, match=r"env\.default\.examples: 2 examples take \d+ tokens, and leave none of data"):
        EnvRole(stage.worker(1, settings | {"data": {"max_prompt_tokens": 64}}))


@pytest.mark.parametrize("template", [QWEN2_5, QWEN3], ids=["qwen2.5", "qwen3"])
@pytest.mark.parametrize("thinking", ["keep", "cut"])
def test_by_steps_later_prompts_omit_reasoning_if_configured(stage: Stage, template: str, thinking: str) -> None:
    """After a tool result, even a template that drops old reasoning still shows the reasoning of the call."""
    env = {"name": "tools", "options": {"tools": ["calculator"], "format": "hermes"}, "max_turns": 3}
    worker = stage.worker(1, {"env": {"default": env | {"episode": "steps", "thinking": thinking}}})
    worker.tokenizer.chat_template = template
    role, sample = EnvRole(worker), make_sample_id(next(UIDS), 0, 0)
    play(stage, role, turn(sample, "plain", room=1000))
    called = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'
    said = f"<think>\nSix times seven?\n</think>\n\n{called}"
    assert not play(stage, role, msgspec.structs.replace(turn(sample, room=1000), text=said)).result.error
    _, delta = stage.deltas()
    prompt = role._worker.tokenizer.decode(np.frombuffer(delta.token_ids, np.int32))
    assert ("Six times seven?" in prompt) == (thinking == "keep")
    assert f"{called}<|im_end|>" in prompt and "42" in prompt
    assert thinking == "keep" or f"assistant\n{called}" in prompt
    role.close()


def test_a_remote_environment_runs_in_the_event_loop(stage: Stage) -> None:
    with serving(numbers={"name": "guess", "options": {"high": 9, "tag": ""}}) as url:
        env = {"name": "remote", "options": {"url": url, "section": "numbers"}, "max_turns": 2}
        role, sample = EnvRole(stage.worker(1, {"env": {"default": env}})), make_sample_id(next(UIDS), 0, 0)
        assert not play(stage, role, turn(sample, "plain", room=1000)).result.error
        second = play(stage, role, turn(sample, room=1000))
        assert not second.result.error and second.result.metrics["action_is_valid"] == 1.0
        assert not any(thread.name == "environment" for thread in threading.enumerate())
        role.close()
    stage.deltas()
