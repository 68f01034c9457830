"""The env role: plays one environment per sample, turn by turn."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hpcrl.dist.messages import Observed, Response, ScoredSample, TurnDelta
from hpcrl.envs import env_class, make_env
from hpcrl.envs.base import Env
from hpcrl.roles.dialogue import observation_ids
from hpcrl.rollout.types import FinishReason, split_sample_id

if TYPE_CHECKING:
    from hpcrl.roles.worker import Worker

ERROR_CHARS = 2000
NO_TOKENS = np.empty(0, dtype=np.int32)


@dataclass
class _Episode:
    env: Env
    reward: float = 0.0
    num_turns: int = 0


class EnvRole:
    """Has no commands of its own: a turn comes by mail, the observation goes back to the sample's generator rank.

    Siblings of a group get the same seed. An environment that raises, or gives what is no number or no text, costs its
    sample reward 0 and ends the episode; an observation that leaves no room for another turn ends it with the reward so
    far. Both are errors of the sample. A generator rank says which samples it has dropped.
    """

    busy = False

    def __init__(self, worker: Worker):
        """ValueError when the section leads to no environment."""
        if worker.config.env is not None:
            env_class(worker.config.env)
        self._worker = worker
        self._episodes: dict[int, _Episode] = {}
        worker.world.mailbox.open()

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return {}

    def look_after(self) -> bool:
        arrived = self._worker.world.mailbox.receive(Response)
        for turn in arrived:
            if turn.reason == FinishReason.ABORT:
                self._end(turn.sample)
            else:
                self._answer(turn)
        return bool(arrived)

    def close(self) -> None:
        for sample in list(self._episodes):
            self._end(sample)

    def _answer(self, turn: Response) -> None:
        """Play a turn; its observation goes to the generator rank, what became of the sample to the controller."""
        worker, config = self._worker, self._worker.config.env
        assert config is not None
        worker.world.trace.enter(f"environment {config.name}")
        token_ids = NO_TOKENS
        try:
            observation, result, ended = self._play(turn)
            if not ended:
                token_ids = observation_ids(worker.tokenizer, observation, turn.last_token)
                if len(token_ids) > turn.room:
                    text = f"an observation of {len(token_ids)} tokens is too long, there is room for {turn.room}"
                    result, ended = msgspec.structs.replace(result, error=_text(config.name, text)), True
        except (Exception, SystemExit) as failure:  # one bad environment is data, not a crash
            error = _text(config.name, f"{type(failure).__name__}: {failure}")
            result, ended = ScoredSample(turn.sample, 0.0, 0.0, error), True
        if ended:
            self._end(turn.sample)
        else:
            worker.world.mailbox.send(turn.reply_to, [TurnDelta(turn.sample, token_ids.tobytes())])
        worker.emit(Observed(turn.sample, ended, result))
        worker.world.trace.enter("idle")

    def _play(self, turn: Response) -> tuple[str, ScoredSample, bool]:
        """(observation, result so far, whether the episode is over). Raises whatever the environment raises."""
        config = self._worker.config.env
        assert config is not None
        episode = self._episodes.get(turn.sample)
        if episode is None:
            episode = self._episodes[turn.sample] = _Episode(make_env(config, json.loads(turn.meta)))
            episode.env.reset(self._worker.config.seed + split_sample_id(turn.sample)[0])
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
