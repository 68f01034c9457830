"""Third-party environments of verifiers: its own and its adapters' play like without hpcrl."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from hpcrl.config import EnvConfig, parse
from hpcrl.data.env_sources import HALF
from hpcrl.envs.factory import check_env, make_env, runs_in, validate_envs
from tests.contracts.test_env import HOSTILE, ROW, play, play_beside

HERE = "tests.envs.verifiers_envs"
SUMS = {
    "entry_point": "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv",
    "kwargs": {"gym": "chain_sum", "num_train_examples": 12, "num_eval_examples": 3},
}
pytestmark = pytest.mark.outside


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Without the package, the tests that ask for the event loop are skipped."""
    pytest.importorskip("verifiers.envs.multiturn_env", reason="verifiers is not installed; make test-outside")
    made = asyncio.new_event_loop()
    yield made
    made.close()


class Waited:
    """An environment whose coroutines are awaited."""

    def __init__(self, loop: asyncio.AbstractEventLoop, row: dict[str, Any] | None = None, **options: Any):
        self.loop, self.config = loop, EnvConfig(name="verifiers", options=options)
        self.env: Any = make_env(self.config, ROW | (row or {}))

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    def reset(self, seed: int) -> Any:
        return self._wait(self.env.reset(seed))

    def step(self, action: str) -> Any:
        return self._wait(self.env.step(action))

    def close(self) -> None:
        self._wait(self.env.close())


def call(**arguments: Any) -> str:
    return f"I add. <tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"


def test_the_seed_chooses_a_row_and_the_rubric_scores(loop: asyncio.AbstractEventLoop) -> None:
    from hpcrl.envs.adapters.verifiers import environment

    env = Waited(loop, **SUMS)
    check_env(env.config, "default")
    assert runs_in(env.config) == "task"
    library = environment(env.env._options)
    rows = {
        split: list(rows) for split, rows in (("train", library.get_dataset()), ("val", library.get_eval_dataset()))
    }
    for split, first in (("train", 0), ("val", HALF)):
        seen = set()
        for seed in range(first, first + 24):
            messages, info = env.reset(seed)
            assert messages == env.reset(seed)[0] and info == {}
            (row,) = [row for row in rows[split] if row["prompt"] == messages]
            seen.add(row["answer"])
        assert len(seen) > len(rows[split]) / 2
    right = library.rg_dataset[int(row["answer"])]["answer"]
    *_, reward, ended, truncated, info = env.step(f"<answer>{right}</answer>")
    assert (reward, ended, truncated) == (1.0, True, False)
    assert info["metrics"] == {"check_answer_reward_func": 1.0, "format_reward_func": 1.0, "success": 1.0}
    env.reset(0)
    assert env.step("seven")[1] < 0.5 and env.env._rollout.done()
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("seven")


def test_turns_match_the_original_game(loop: asyncio.AbstractEventLoop) -> None:
    from gem.envs.game_env.guess_the_number import GuessTheNumberEnv

    env = Waited(loop, entry_point=f"{HERE}:guessing")
    for seed in range(4):
        messages, _ = env.reset(seed)
        game = GuessTheNumberEnv(max_number=5)
        row = next(row for row in env.env._env.get_dataset() if row["prompt"] == messages)
        game.reset(int(row["answer"]))
        total, ended = 0.0, False
        for number in (4, 2, 5, 1, 3):
            text, reward, ended, *_ = game.step(f"\\boxed{{{number}}}")
            total += reward
            said, given, over, _, _ = env.step(f"\\boxed{{{number}}}")
            shown = f"{text}\nEpisode already ended." if ended else text
            assert said == [{"role": "user", "content": shown}] and (given, over) == (0.0, False)
            if ended:
                break
        *_, reward, over, _, info = env.step("Good.")  # GymEnv asks once more after the end
        assert over and reward == pytest.approx(total) and info["metrics"]["sum_step_rewards"] == pytest.approx(total)


def test_tools_are_listed_called_and_answered(loop: asyncio.AbstractEventLoop) -> None:
    env = Waited(loop, entry_point=f"{HERE}:adding")
    messages, info = env.reset(1)
    assert [message["role"] for message in messages] == ["system", "user"]
    about = info["tools"][0]["function"]
    assert about["name"] == "add" and set(about["parameters"]["properties"]) == {"first", "second"}
    two, *_ = env.step(call(first=2, second=3) + call(first=1, second=1))
    assert two == [
        {"role": "tool", "content": "5", "tool_call_id": "call00100"},
        {"role": "tool", "content": "2", "tool_call_id": "call00101"},
    ]
    wrong, _, ended, *_ = env.step('<tool_call>{"name": "add", </tool_call><tool_call>{"name": "sub"}</tool_call>')
    assert [message["role"] for message in wrong] == ["tool", "tool"] and not ended
    assert "Expecting value" in wrong[0]["content"] and "sub" in wrong[1]["content"]
    *_, reward, ended, _, info = env.step("It is 5.")
    assert (reward, ended) == (1.0, True)
    assert info["metrics"] == {
        "says_answer": 1.0,
        "num_turns": 3.0,
        "total_tool_calls": 4.0,
        "add_calls": 2.0,
        "success": 1.0,
    }


def test_rows_of_the_run_can_be_tasks(loop: asyncio.AbstractEventLoop) -> None:
    row = {"messages": [{"role": "user", "content": "2 + 4?"}], "answer": "6"}
    env = Waited(loop, row, entry_point=f"{HERE}:adding", task="row")
    for _ in range(2):
        assert env.reset(3)[0] == [{"role": "system", "content": "Use tools."}, *row["messages"]]
        assert env.step("6")[1] == 1.0
    assert Waited(loop, entry_point=f"{HERE}:adding").reset(3)[0][1]["content"] == "Go on."


def test_an_episode_keeps_the_protocol_for_any_model_output(loop: asyncio.AbstractEventLoop) -> None:
    for options, end in (({"entry_point": f"{HERE}:Rough"}, "end"), ({"entry_point": f"{HERE}:adding"}, "5")):
        responses = [*(HOSTILE if end == "end" else [call(first=1, second=hostile) for hostile in HOSTILE[:7]]), end]
        first = play(Waited(loop, **options), 3, responses)
        assert play(Waited(loop, **options), 3, responses) == first
        one, other = Waited(loop, **options), Waited(loop, **options)
        together = play_beside(one, other, 3, responses[: len(first) - 1])
        assert together == first, "two episodes of one environment do not know each other"
        other.close()


def test_ending_and_closing_clean_up_once(loop: asyncio.AbstractEventLoop) -> None:
    from tests.envs.verifiers_envs import CLEANED

    CLEANED.clear()
    env = Waited(loop, entry_point=f"{HERE}:Rough")
    env.reset(0)
    assert env.step("no")[0] == [{"role": "user", "content": "You said no."}] and not CLEANED
    said, reward, ended, truncated, info = env.step("end")
    assert (said, ended, truncated) == ([{"role": "user", "content": "It is over."}], True, False)
    assert (reward, info["metrics"]["success"], CLEANED) == (0.0, 0.0, ["yes"])
    env.close()
    env.reset(0)
    env.step("no")
    env.close()
    env.close()
    assert CLEANED == ["yes"] * 2
    assert asyncio.all_tasks(loop) == set()


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        ("error", "VerifiersError", "no such tool"),
        ("raise", "KeyError", "no such move"),
        ("rewrite", "VerifiersError", "rewrites the dialogue"),
        ("picture", "VerifiersError", "a part of type .*image_url"),
    ],
)
def test_errors_of_an_environment_are_raised_to_the_role(
    loop: asyncio.AbstractEventLoop, said: str, error: str, text: str
) -> None:
    env = Waited(loop, entry_point=f"{HERE}:Rough")
    env.reset(0)
    with pytest.raises(Exception, match=text) as raised:
        env.step(said)
    assert type(raised.value).__name__ == error
    env.reset(0)
    assert env.step("no")[0] == [{"role": "user", "content": "You said no."}], "the next episode is sound"
    env.close()


@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"id": "no-such-env"}, "id: 'no-such-env' gives no environment with the arguments {}: ValueError: Could not"),
        ({"entry_point": f"{HERE}:fails", "kwargs": {"text": "x"}}, "gives no environment with the arguments {'text':"),
        ({"entry_point": f"{HERE}:data"}, "entry_point: 'tests.envs.verifiers_envs:data' gives no environment of veri"),
        ({"entry_point": f"{HERE}:comparing"}, "scores groups; use it as reward function with add_reward"),
    ],
)
def test_env_ranks_name_unusable_environments(options: dict[str, Any], problem: str) -> None:
    config = parse({"env": {"default": {"name": "verifiers", "options": options}}})
    assert validate_envs(config, {}) == [], "code of others is imported by env ranks only"
    with pytest.raises(ValueError, match=r"env\.default\.options\.") as raised:
        check_env(config.envs["default"], "default")
    assert problem in str(raised.value)


@pytest.mark.usefixtures("loop")
def test_the_model_must_use_a_known_tool_format() -> None:
    config = EnvConfig(name="verifiers", options={"entry_point": f"{HERE}:adding"})
    with pytest.raises(ValueError, match=r"env\.default\.options\.format: the model's chat template shows tools"):
        check_env(config, "default", "{{ tools }} <function=")
    check_env(
        EnvConfig(name="verifiers", options={"entry_point": f"{HERE}:Rough"}), "default", "{{ tools }} <function="
    )


@pytest.mark.usefixtures("loop")
def test_an_environment_does_not_change_the_signal_handlers_of_the_process() -> None:
    from hpcrl.envs.adapters.verifiers import _loaded, environment
    from hpcrl.envs.spec import VerifiersOptions

    _loaded.cache_clear()
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    environment(VerifiersOptions(entry_point=f"{HERE}:Rough"))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
