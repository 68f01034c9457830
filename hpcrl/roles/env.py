"""The env role: plays one environment per sample, turn by turn."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hpcrl.control.messages import Observed, Response, ScoredSample, TurnDelta
from hpcrl.control.queues import StoreLost
from hpcrl.envs import env_class, make_env
from hpcrl.envs.base import Env
from hpcrl.roles.dialogue import observation_ids
from hpcrl.rollout.types import FinishReason, episode_seed, split_sample_id

if TYPE_CHECKING:
    from hpcrl.roles.worker import Worker

ERROR_CHARS = 2000
NO_TOKENS = np.empty(0, dtype=np.int32)


@dataclass
class _Episode:
    env: Env
    reward: float = 0.0
    num_turns: int = 0


class _TooLate(Exception):
    """A turn took longer than env.timeout_s."""


class _Turn:
    """A turn that an environment plays, in a thread of its own."""

    def __init__(self, response: Response):
        self.response, self._began = response, time.monotonic()
        self.played: Future[tuple[str, ScoredSample, bool]] = Future()

    def is_over(self, now: float, timeout_s: float) -> bool:
        """Whether it has ended; one that takes longer than timeout_s does now, with _TooLate."""
        if not self.played.done() and now - self._began > timeout_s:
            self.end(_TooLate(f"step() did not return within {timeout_s:g} s (env.timeout_s)"))
        return self.played.done()

    def end(self, result: tuple[str, ScoredSample, bool] | BaseException) -> bool:
        """Set what came of it, unless it has ended before; whether it had not."""
        try:
            if isinstance(result, BaseException):
                self.played.set_exception(result)
            else:
                self.played.set_result(result)
        except InvalidStateError:
            return False
        return True


class EnvRole:
    """Has no commands of its own: a turn comes by mail, the observation goes back to the sample's generator rank.

    env.num_threads turns are played at once, so that environments that wait for something do not wait for each other.
    Siblings of a group get the same seed. An environment that raises, or gives what is no number or no text, costs its
    sample reward 0 and ends the episode; an observation that leaves no room for another turn ends it with the reward so
    far. Both are errors of the sample. A generator rank says which samples it has dropped.
    """

    def __init__(self, worker: Worker):
        """ValueError when the section leads to no environment."""
        assert worker.config.env is not None, "a run with env ranks has an environment"
        self._config = worker.config.env
        env_class(self._config)
        self._worker = worker
        self._episodes: dict[int, _Episode] = {}
        self._waiting: deque[Response] = deque()  # turns without a thread, in order
        self._playing: dict[int, _Turn] = {}
        self._at_work: set[int] = set()  # samples that wait or play
        self._hanging: set[int] = set()  # samples that were given up and whose environment is at work
        self._dropped: set[int] = set()  # of these, the ones whose episode nobody wants any more
        worker.world.mailbox.open()

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return {}

    @property
    def busy(self) -> bool:
        return bool(self._playing)

    def look_after(self) -> bool:
        arrived = self._worker.world.mailbox.receive(Response)
        for response in arrived:
            if response.reason != FinishReason.ABORT:
                self._waiting.append(response)
                self._at_work.add(response.sample)
            elif response.sample in self._at_work:
                self._dropped.add(response.sample)
            else:
                self._end(response.sample)
        now, timeout_s = time.monotonic(), self._worker.config.turn_timeout_s
        over = [sample for sample, turn in self._playing.items() if turn.is_over(now, timeout_s)]
        for sample in over:
            turn = self._playing.pop(sample)
            self._answer(turn.response, turn.played)
        while self._waiting and len(self._playing) < self._config.num_threads:
            self._begin(self._waiting.popleft())
        if over and not self._playing:
            self._worker.world.trace.enter("idle")
        return bool(arrived or over)

    def close(self) -> None:
        for sample in [sample for sample in self._episodes if sample not in self._hanging]:
            self._end(sample)

    def _begin(self, response: Response) -> None:
        self._worker.world.trace.enter(f"environment {self._config.name}")
        turn = self._playing[response.sample] = _Turn(response)
        turn.played.add_done_callback(lambda _: self._worker.world.mailbox.news.set())
        # A daemon, and one of its own: an environment that hangs keeps it for ever, and no other may wait behind it.
        threading.Thread(target=self._run, args=(turn,), name="environment", daemon=True).start()

    def _run(self, turn: _Turn) -> None:
        result: tuple[str, ScoredSample, bool] | BaseException
        try:
            result = self._play(turn.response)
        except BaseException as error:  # told by _answer; a user's code may call sys.exit
            result = error
        if not turn.end(result):  # it was given up
            self._end(turn.response.sample)

    def _answer(self, turn: Response, played: Future) -> None:
        """Tell what came of a turn: its observation to the generator rank, what became of the sample to the
        controller."""
        worker, name = self._worker, self._config.name
        token_ids = NO_TOKENS
        try:
            observation, result, ended = played.result()
            if not ended:
                token_ids = observation_ids(worker.tokenizer, observation, turn.last_token)
                if len(token_ids) > turn.room:
                    text = f"an observation of {len(token_ids)} tokens is too long, there is room for {turn.room}"
                    result, ended = msgspec.structs.replace(result, error=_text(name, text)), True
        except (Exception, SystemExit) as failure:  # one bad environment is data, not a crash
            error = _text(name, f"{type(failure).__name__}: {failure}")
            result, ended = ScoredSample(turn.sample, 0.0, 0.0, error), True
        dropped = turn.sample in self._dropped
        self._dropped.discard(turn.sample)
        self._at_work.discard(turn.sample)
        if isinstance(played.exception(), _TooLate):
            self._hanging.add(turn.sample)  # its thread closes the environment, should that ever return
        elif ended or dropped:
            self._end(turn.sample)
        else:
            # A generator that is gone: the controller learns of it from its agent and starts the sample anew.
            with contextlib.suppress(StoreLost):
                worker.world.mailbox.send(turn.reply_to, [TurnDelta(turn.sample, token_ids.tobytes())])
        worker.emit(Observed(turn.sample, ended, result))

    def _play(self, turn: Response) -> tuple[str, ScoredSample, bool]:
        """(observation, result so far, whether the episode is over). Raises whatever the environment raises."""
        config = self._config
        episode = self._episodes.get(turn.sample)
        if episode is None:
            episode = self._episodes[turn.sample] = _Episode(make_env(config, json.loads(turn.meta)))
            episode.env.reset(episode_seed(self._worker.config.seed, split_sample_id(turn.sample)[0]))
        observation, gained, terminated, truncated, info = episode.env.step(turn.text)
        # float and str, since numpy's and torch's numbers do not travel
        episode.reward += float(gained)
        episode.num_turns += 1
        metrics = {str(name): float(value) for name, value in info.get("metrics", {}).items()}
        result = ScoredSample(turn.sample, episode.reward, metrics.get("success", episode.reward), "", metrics)
        over = bool(terminated or truncated) or episode.num_turns >= config.max_turns
        return observation, result, over or turn.reason == FinishReason.LENGTH

    def _end(self, sample: int) -> None:
        """Forget an episode; its environment may have something to close."""
        episode = self._episodes.pop(sample, None)
        if episode is not None and hasattr(episode.env, "close"):
            with contextlib.suppress(Exception, SystemExit):  # the sample has its result
                episode.env.close()


def _text(name: str, problem: str) -> str:
    """An error message that can travel, whatever a user's code put into it."""
    text = problem[:ERROR_CHARS].encode(errors="replace").decode()
    return f"environment {name}: {text}"
