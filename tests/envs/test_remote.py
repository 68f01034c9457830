"""Environments behind HTTP: the episode is the same as a local one, and a lost server is an error."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import EnvConfig, parse
from hpcrl.envs.adapters import remote as client
from hpcrl.envs.adapters.remote import RemoteEnvError
from hpcrl.envs.factory import check_env, make_env, runs_in
from hpcrl.envs.spec import RemoteOptions
from hpcrl.launch.env_server import EnvServer, main

ROW = {"prompt": "?", "answer": "4", "messages": [{"role": "user", "content": "?"}], "extra": {"hint": "left"}}
GUESS = {"name": "guess", "options": {"high": 9}}
TOKEN = "HPCRL_TEST_ENV_TOKEN"
PLAYED: list[str] = []
CLOSED: list[str] = []
GO_ON = threading.Event()


class Noted:
    """Records the actions; `answer` and `hint` come from the row."""

    def __init__(self, answer: str, hint: str, chat_template: str):
        self._told = f"{answer} {hint} {chat_template}"

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return f"{self._told} {seed}", {"tools": [{"type": "function", "function": {"name": "f"}}]}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        PLAYED.append(action)
        if action == "raise":
            raise KeyError("no such move")
        if action == "wait":
            GO_ON.wait(30)
        return [{"role": "tool", "content": action}], 0.5, action == "end", False, {"metrics": {"success": 1}}

    def close(self) -> None:
        CLOSED.append(self._told)


@contextmanager
def serving(token: str = "", idle_s: float = 600.0, max_sessions: int = 9, **env: Any) -> Iterator[str]:
    server = EnvServer(parse({"env": env}), ("127.0.0.1", 0), token, idle_s, max_sessions)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def coroutines(url: str, template: str = "", **options: Any) -> Any:
    """A remote environment as env ranks use it."""
    return make_env(EnvConfig(name="remote", options={"url": url, "retry_s": 0.0, **options}), ROW, template)


class Waiting:
    """A remote environment whose methods block until the answer."""

    def __init__(self, env: Any):
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return lambda *given: asyncio.run(getattr(self._env, name)(*given))


def remote(url: str, template: str = "", **options: Any) -> Any:
    return Waiting(coroutines(url, template, **options))


def ask(options: RemoteOptions, what: str, content: dict[str, Any]) -> dict[str, Any]:
    return asyncio.run(client.ask(options, what, content))


NOTED = {"name": "class", "class_path": "tests.envs.test_remote:Noted"}


def test_a_game_behind_a_server_gives_the_same_episode() -> None:
    here = make_env(EnvConfig(**GUESS), ROW)
    with serving(guessing=GUESS, default=NOTED) as url:
        there = remote(url, section="guessing")
        assert there.reset(5) == (here.reset(5)[0], {"metrics": {}})
        for n in (1, 9, "x", 5):
            assert there.step(f"<answer>{n}</answer>") == here.step(f"<answer>{n}</answer>")
        there.close()


def test_images_pass_a_server_as_data_urls() -> None:
    lake = {"name": "frozen_lake", "options": {"show": "image"}}
    tools = {"name": "tools", "options": {"tools": ["crop"]}}
    here: Any = make_env(EnvConfig.model_validate(lake), ROW)
    (message,) = here.reset(5)[0]
    url_of_image = f"data:application/octet-stream;base64,{base64.b64encode(message['images'][0]).decode()}"
    with serving(lake=lake, tools=tools) as url:
        made = remote(url, section="lake")
        assert made.reset(5)[0] == [{**message, "images": [url_of_image]}]
        made.close()
        row = ROW | {"extra": {"images": [message["images"][0]]}}
        crops = Waiting(make_env(EnvConfig(name="remote", options={"url": url, "section": "tools"}), row))
        crops.reset(0)
        call = {"name": "crop", "arguments": {"bbox": [0, 0, 28, 28]}}
        (seen,) = crops.step(f"<tool_call>{json.dumps(call)}</tool_call>")[0]
        assert seen["content"].startswith("Image 2, 56 x 56 pixels") and len(seen["images"]) == 1
        crops.close()


class Shows:
    """Shows the images of its row, and a file of its own machine."""

    own = ""

    def __init__(self, images: list[str]):
        self._images = images

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        return [{"role": "user", "content": "", "images": [*self._images, self.own]}], {}

    step = Noted.step


def test_paths_of_images_become_files_in_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path names a file of one machine only."""
    contents = [b"\x89PNG" + bytes([number]) for number in range(4)]
    urls = [f"data:application/octet-stream;base64,{base64.b64encode(content).decode()}" for content in contents]
    (tmp_path / "row.png").write_bytes(contents[0])
    (tmp_path / "server.png").write_bytes(contents[3])
    monkeypatch.setattr(Shows, "own", str(tmp_path / "server.png"))
    shows = {"name": "class", "class_path": "tests.envs.test_remote:Shows"}
    with serving(default=shows) as url:
        config = EnvConfig(name="remote", options={"url": url, "retry_s": 0.0})
        row = ROW | {"extra": {"images": [str(tmp_path / "row.png"), urls[1], contents[2]]}}
        made = Waiting(make_env(config, row))
        [message] = made.reset(0)[0]
        assert message["images"] == urls
        made.close()
        monkeypatch.setattr(Shows, "own", str(tmp_path / "gone.png"))
        with pytest.raises(RemoteEnvError, match=r"FileNotFoundError: .*gone\.png"):
            made.reset(0)
        gone = Waiting(make_env(config, ROW | {"extra": {"images": [str(tmp_path / "gone.png")]}}))
        with pytest.raises(FileNotFoundError, match=r"gone\.png"):
            gone.reset(0)
    for path in ("/etc/hostname", "file:///etc/hostname"):
        with pytest.raises(TypeError, match=f"the server sent the path of an image, '{path}', instead of a data URL"):
            client._own([{"role": "user", "content": "", "images": [path]}])


def test_a_server_can_play_asynchronous_environments() -> None:
    """Here a remote environment: the server asks another server."""
    CLOSED.clear()
    with serving(default=NOTED) as url, serving(default={"name": "remote", "options": {"url": url}}) as relay:
        made = remote(relay)
        assert made.reset(3)[0].startswith("4 left") and made.step("end")[1] == 0.5
        made.close()
    assert CLOSED == ["4 left "]


def test_columns_template_and_tools_are_sent_and_a_session_is_closed_once() -> None:
    CLOSED.clear()
    with serving(default=NOTED) as url:
        made = remote(url, "template")
        text, info = made.reset(3)
        assert text == "4 left template 3" and info["tools"][0]["function"] == {"name": "f"}
        assert made.step("end") == (
            [{"role": "tool", "content": "end"}],
            0.5,
            True,
            False,
            {"metrics": {"success": 1.0}},
        )
        made.close()
        made.close()
    assert CLOSED == ["4 left template"]


def test_a_repeated_step_request_is_played_once() -> None:
    with serving(default=NOTED) as url:
        PLAYED.clear()
        options = RemoteOptions(url=url)
        asked = {"section": "default", "seed": 0, "row": {"answer": "4", "hint": ""}}
        session = ask(options, "reset", asked)["session"]
        first = [ask(options, "step", {"session": session, "number": 0, "action": "a"}) for _ in range(2)]
        assert first[0] == first[1] and PLAYED == ["a"]
        with pytest.raises(RemoteEnvError, match="step 4 of the session after 1 steps"):
            ask(options, "step", {"session": session, "number": 4, "action": "a"})


def test_exceptions_and_timeouts_are_errors_of_their_episode() -> None:
    with serving(default=NOTED) as url:
        made, slow = remote(url), remote(url, timeout_s=2.0)
        made.reset(0)
        slow.reset(0)
        with pytest.raises(RemoteEnvError, match="KeyError: 'no such move'"):
            made.step("raise")
        with pytest.raises(RemoteEnvError, match="there is no such session"):
            made.step("on")
        with pytest.raises(RemoteEnvError, match=r"no answer to step within 2 s"):
            slow.step("wait")
        GO_ON.set()
        other = remote(url)
        other.reset(0)
        assert other.step("on")[1] == 0.5


@pytest.mark.slow
def test_many_episodes_wait_concurrently_in_one_thread() -> None:
    """Each step waits until all are played."""
    count, config = 100, EnvConfig(name="remote", options={"url": "http://127.0.0.1:1"})
    assert runs_in(config) == "task"
    PLAYED.clear()
    GO_ON.clear()

    async def episode(url: str) -> float:
        env = coroutines(url, retry_s=10.0)
        await env.reset(0)
        _, reward, *_ = await env.step("wait")
        await env.close()
        return float(reward)

    async def all_of(url: str) -> list[float]:
        episodes = [asyncio.ensure_future(episode(url)) for _ in range(count)]
        while len(PLAYED) < count:
            assert not any(one.done() for one in episodes)
            await asyncio.sleep(0.01)
        GO_ON.set()
        return await asyncio.gather(*episodes)

    with serving(max_sessions=count, default=NOTED) as url:
        assert asyncio.run(all_of(url)) == [0.5] * count


def test_an_abandoned_session_is_closed() -> None:
    CLOSED.clear()
    with serving(idle_s=1.0, default=NOTED) as url:
        made = remote(url)
        made.reset(0)
        for _ in range(1000):
            if CLOSED:
                break
            threading.Event().wait(0.02)
        with pytest.raises(RemoteEnvError, match="there is no such session: it was closed, idle too long"):
            made.step("late")


@pytest.mark.parametrize(
    ("what", "content", "error"),
    [
        ("reset", {"section": "default", "seed": "x", "row": {}}, "the request is not as expected: Expected `int`"),
        ("reset", {"section": "maze", "seed": 0, "row": {}}, "there is no section 'maze'; there are default"),
        ("step", {"session": "x", "number": 0, "action": "a"}, "there is no such session"),
        ("step", {"session": "x", "number": 0, "action": "a", "more": 1}, "unknown field `more`"),
        ("play", {}, "nothing is served at '/play'"),
    ],
)
def test_a_malformed_request_is_refused(what: str, content: dict[str, Any], error: str) -> None:
    with serving(default=NOTED) as url, pytest.raises(RemoteEnvError, match=error):
        ask(RemoteOptions(url=url), what, content)


def test_a_server_answers_only_clients_with_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving("secret", default=NOTED) as url:
        with pytest.raises(RemoteEnvError, match="the token is wrong"):
            remote(url).reset(0)
        monkeypatch.setenv(TOKEN, "secret")
        remote(url, token_env=TOKEN).reset(0)


@pytest.mark.parametrize(
    ("token", "error"),
    [
        ("", f"token_env: the environment variable {TOKEN} is not set"),
        ("secret\n", f"token_env: the token in {TOKEN} has characters that are not allowed in an HTTP header"),
        ("secret€", f"token_env: the token in {TOKEN} has characters that are not allowed in an HTTP header"),
    ],
)
def test_an_unusable_token_is_not_printed(monkeypatch: pytest.MonkeyPatch, token: str, error: str) -> None:
    monkeypatch.setenv(TOKEN, token)
    with serving("secret", default=NOTED) as url:
        config = EnvConfig(name="remote", options={"url": url, "token_env": TOKEN})
        for ask_it in (lambda: check_env(config, "default"), lambda: remote(url, token_env=TOKEN).reset(0)):
            with pytest.raises((ValueError, RemoteEnvError), match=error) as told:
                ask_it()
            assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    ("token", "error"), [("wrong", "the token is wrong"), ("secret", "a Content-Length of at most")]
)
def test_a_client_that_sends_a_large_body_gets_the_reason_for_the_refusal(
    monkeypatch: pytest.MonkeyPatch, token: str, error: str
) -> None:
    monkeypatch.setenv(TOKEN, token)
    content = {"section": "default", "seed": 0, "row": {"hint": "x" * (70 << 20)}}
    with serving("secret", default=NOTED) as url, pytest.raises(RemoteEnvError, match=error):
        ask(RemoteOptions(url=url, token_env=TOKEN), "reset", content)


def test_a_body_is_read_only_after_the_request_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are answered before it comes."""
    with serving("secret", default=NOTED) as url:
        host, port = url.removeprefix("http://").split(":")
        for headers, status in (
            ("Content-Length: 999\r\n", 401),
            ("Authorization: Bearer secret\r\nContent-Length: 99999999999\r\n", 413),
            ("Authorization: Bearer secret\r\n", 413),
        ):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(f"POST /reset HTTP/1.0\r\n{headers}\r\n".encode())
                assert connection.recv(99).startswith(f"HTTP/1.0 {status} ".encode())


def test_a_server_has_no_more_sessions_than_configured() -> None:
    with serving(max_sessions=1, default=NOTED) as url:
        first, second = remote(url), remote(url)
        first.reset(0)
        with pytest.raises(RemoteEnvError, match="the server has 1 sessions, as many as --max-sessions allows"):
            second.reset(0)
        first.close()
        second.reset(0)


def test_an_env_rank_starts_only_if_the_server_has_its_section() -> None:
    with serving(maze=GUESS) as url:
        config = EnvConfig(name="remote", options={"url": url, "section": "maze", "retry_s": 0.0})
        check_env(config, "a")
        wrong = config.model_copy(update={"options": {**config.options, "section": "lake"}})
        with pytest.raises(ValueError, match=r"env\.a\.options\.section: the server has no 'lake'; it has maze"):
            check_env(wrong, "a")
    with pytest.raises(ValueError, match=r"env\.a\.options\.url: .*the environment server does not answer"):
        check_env(config, "a")


def test_a_server_on_a_public_address_requires_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", "0.0.0.0", "env.default.name=guess"]) != 0
    assert main(["env.default.name=class", "env.default.class_path=no.such:thing"]) != 0
    assert main(["--port", "99999", "env.default.name=guess"]) != 0
    told = capsys.readouterr().err
    assert "--port 99999: a port is a number from 0 to 65535" in told
    assert "needs a token unless it listens on 127.0.0.1" in told and "no.such:thing: importing no.such failed" in told


@pytest.mark.slow
def test_a_server_killed_during_an_episode_is_an_error_of_the_episode() -> None:
    words = ["env.default.name=guess", "env.default.options.high=9"]
    server = subprocess.Popen(
        [sys.executable, "-m", "hpcrl.launch.env_server", *words], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        [url] = re.findall(r"environments default at (http://\S+)", line)
        made = remote(url, retry_s=0.5)
        json.dumps(made.reset(1))
        assert made.step("<answer>0</answer>")[4]["metrics"]["action_is_valid"] == 0.0
        server.kill()
        server.wait()
        with pytest.raises(RemoteEnvError, match="the environment server does not answer"):
            made.step("<answer>5</answer>")
    finally:
        server.kill()
        server.wait()
