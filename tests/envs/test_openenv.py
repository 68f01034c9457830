"""Environments behind OpenEnv servers: the one that its own command generates, and a test environment."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from hpcrl.config import EnvConfig, parse
from hpcrl.envs.factory import check_env, make_env, validate_envs
from tests.contracts.test_env import HOSTILE, ROW, play, play_beside, tagged

URL = "http://127.0.0.1:1"
MOVES = {"action": {"place": {"by": "{answer}"}}, "observation": "messages.-1.content", "success": "observation.won"}

OWN = {"client": "echoing_env:EchoingEnv", "action_class": "echoing_env:EchoingAction"}


def made(url: str, row: dict[str, Any] | None = None, **options: Any) -> Any:
    return make_env(
        EnvConfig(name="openenv", options={"url": url, "turn": "{observation}"} | options), ROW | {"extra": row or {}}
    )


def played(url: str, seed: int, responses: list[str], **options: Any) -> list[Any]:
    """All of an episode; its session is closed, since a server allows only a limited number."""
    env = made(url, **options)
    try:
        return play(env, seed, responses)
    finally:
        env.close()


def client_class(env: Any) -> str:
    return type(env._client._async).__name__


@pytest.fixture(scope="module")
def corridor() -> Iterator[str]:
    pytest.importorskip("openenv.core", reason="openenv is not installed; make test-outside")
    from tests.envs.openenv_server import serving

    with serving() as url:
        yield url


@pytest.fixture(scope="module")
def written(corridor: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server of the environment that `openenv init echoing_env` writes, an echo."""
    from openenv.cli.commands.init import init

    from tests.envs.openenv_server import serving

    folder = tmp_path_factory.mktemp("openenv")
    init("echoing_env", str(folder))
    sys.path.insert(0, str(folder))
    game = importlib.import_module("echoing_env.server.echoing_env_environment")
    models = importlib.import_module("echoing_env.models")
    with serving(game.EchoingEnvironment, models.EchoingAction, models.EchoingObservation, sessions=1) as url:
        yield url
    sys.path.remove(str(folder))


@pytest.mark.outside
@pytest.mark.parametrize(
    "own",
    [{}, {"client": "echoing_env:EchoingEnv", "action_class": "echoing_env:EchoingAction"}],
    ids=["generic", "own"],
)
def test_the_environment_generated_by_openenv_init_echoes(written: str, own: dict[str, str]) -> None:
    env = made(written, observation="echoed_message", prompt="{observation}", success="done", **own)
    assert env.reset(3) == ("Echoing Env environment ready!", {})
    assert client_class(env) == ("EchoingEnv" if own else "GenericEnvClient")
    assert env.step("I say <answer> Hello </answer>.")[:4] == ("Hello", 0.5, False, False)
    assert env.step("<answer>Hello</answer>")[4]["metrics"]["action_is_effective"] == 0.5
    text, reward, *_, info = env.step("Hello")
    assert text.startswith("That is not a valid action.\n") and "\nHello\n" in text and reward == -0.05
    assert info["metrics"]["action_is_valid"] == 2 / 3
    if not own:
        with pytest.raises(RuntimeError, match="capacity"):  # the server allows one session
            made(written).reset(0)
    env.close()
    env = made(written, **own)
    shown, _ = env.reset(0)
    assert json.loads(shown.splitlines()[0]) == {
        "echoed_message": "Echoing Env environment ready!",
        "message_length": 0,
    }
    env.close()


@pytest.mark.outside
def test_an_episode_by_hand(corridor: str) -> None:
    env = made(corridor, **MOVES, prompt="{observation}")
    check_env(EnvConfig(name="openenv", options={"url": corridor} | MOVES), "default")
    assert env.reset(8)[0] == "0 of 3"
    assert env.step("<answer>2</answer>")[:3] == ("2 of 3", 0.0, False)
    assert env.step("<answer>0</answer>")[4]["metrics"]["action_is_effective"] == 0.5
    text, reward, ended, _, info = env.step("<answer>1</answer>")
    assert (text, reward, ended, info["metrics"]["success"]) == ("3 of 3", -1.0, True, 1.0)
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("<answer>1</answer>")
    assert env.reset(7)[0] == "0 of 2"
    assert env.step("<answer>2</answer>")[1:3] == (-1.0, True)
    env.close()
    for rule, success in (("done", 1.0), ("reward", 0.0)):
        env = made(corridor, row={"reset": {"start": 4}}, **MOVES | {"success": rule, "reset": {"start": 1}})
        assert env.reset(4)[0].startswith("4 of 6")
        assert env.step("<answer>2</answer>")[4]["metrics"]["success"] == success
        env.close()


@pytest.mark.outside
def test_an_episode_keeps_the_protocol(corridor: str) -> None:
    texts = {"prompt": "{observation}", "invalid": "{observation}", "invalid_reward": -0.25}
    walk = [*HOSTILE, *tagged(*"101101111")]
    first = played(corridor, 5, walk, **MOVES, **texts)
    assert [step[:3] for step in first[1 : 1 + len(HOSTILE)]] == [["0 of 7", -0.25, False]] * len(HOSTILE)
    assert first[-1][2] and first[-1][4]["metrics"]["success"] == 1.0
    assert played(corridor, 5, walk, **MOVES, **texts) == first
    one, other = made(corridor, **MOVES, **texts), made(corridor, **MOVES, **texts)
    assert play_beside(one, other, 5, walk[: len(first) - 1]) == first
    one.close()
    other.close()
    assert len({played(corridor, seed, walk[-3:], **MOVES)[0] for seed in range(7)}) == 7


@pytest.mark.outside
def test_errors_of_an_environment_are_raised_to_the_role(corridor: str) -> None:
    from hpcrl.envs.adapters.openenv import OpenEnvError

    env = made(corridor, **MOVES)
    env.reset(5)
    with pytest.raises(RuntimeError, match="no such place"):
        env.step("<answer>-1</answer>")
    env.reset(5)
    env.step("<answer>1</answer>")
    env._client._run(env._client._async._ws.close())  # like a restarted server
    with pytest.raises(OpenEnvError, match="the connection broke"):
        env.step("<answer>0</answer>")
    env.close()
    env = made(corridor, **MOVES | {"observation": "messages.7.content"})
    with pytest.raises(OpenEnvError, match=r"options\.observation: .* has no 'messages\.7\.content'"):
        env.reset(0)
    env.close()


@pytest.mark.outside
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"url": URL}, "url: Failed to connect to ws://127.0.0.1:1/ws"),
        ({"client": "json:JSONDecoder"}, "client: json:JSONDecoder is not an OpenEnv client"),
        ({"client": "no_such_env:Env"}, "client: 'no_such_env:Env' cannot be loaded: ModuleNotFoundError"),
        ({"action_class": "json:Action"}, "action_class: 'json:Action' cannot be loaded: AttributeError"),
    ],
)
def test_env_ranks_name_a_wrong_server_or_client(corridor: str, options: dict[str, Any], problem: str) -> None:
    config = parse({"env": {"default": {"name": "openenv", "options": {"url": corridor} | options}}})
    assert validate_envs(config, {}) == []
    with pytest.raises(ValueError, match=rf"env\.default\.options\.{problem}"):
        check_env(config.envs["default"], "default")


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("openenv", {}, "url: missing"),
        ("openenv", {"url": "node7:8000"}, "url"),
        ("openenv", {"url": URL, "client": "GenericEnvClient"}, "client"),
        ("openenv", {"url": URL, "action": {"message": "answer"}}, "no field of {'message': 'answer'} has {answer}"),
        ("openenv", {"url": URL, "success": "won"}, "'won' is none of reward, done and observation.FIELD"),
        ("openenv", {"url": URL, "turn": "{board}"}, "turn"),
        ("verifiers", {}, "give either id, such as wordle, or entry_point"),
        ("verifiers", {"id": "wordle", "entry_point": "a:b"}, "give either id, such as wordle, or entry_point"),
        ("verifiers", {"id": "wordle", "task": "rows"}, "task"),
    ],
)
def test_wrong_options_are_named_before_the_start(name: str, options: dict[str, Any], problem: str) -> None:
    (line,) = validate_envs(parse({"env": {"default": {"name": name, "options": options}}}), {})
    assert line.startswith("env.default.options") and problem in line


@pytest.mark.parametrize(("name", "package"), [("openenv", "openenv==0.10.0"), ("verifiers", "verifiers==0.1.14")])
def test_a_missing_package_is_named_before_the_start(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcrl.config.abilities import check_installed

    options = {"url": URL} if name == "openenv" else {"id": "wordle"}
    config = parse({"env": {"default": {"name": name, "options": options}}})
    monkeypatch.setattr("hpcrl.spec.kinds.find_spec", lambda module: None)
    (line,) = [problem.text for problem in check_installed(config) if "env.default" in problem.text]
    assert f"{name} is not installed" in line and line.endswith(f"constraints.txt {package}")
