"""The env role: plays one environment per sample, turn by turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.dist.messages import Observed, Response, ScoredSample, TurnDelta
from hpcrl.envs import env_class, make_env
from hpcrl.envs.base import Env
from hpcrl.rollout.types import split_sample_id

if TYPE_CHECKING:
    from hpcrl.roles.worker import Worker


class EnvRole:
    """Has no commands of its own: a turn comes by mail, the observation goes back to the sample's generator rank.

    Siblings of a group get the same seed. An environment that raises costs its sample reward 0 and ends the episode.
    """

    def __init__(self, worker: Worker):
        """ValueError when the section leads to no environment."""
        if worker.config.env is not None:
            env_class(worker.config.env)
        self._worker = worker
        self._envs: dict[int, Env] = {}
        self._totals: dict[int, tuple[float, int]] = {}
        worker.world.mailbox.open()

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return {}

    def look_after(self) -> bool:
        if self._worker.config.env is None:
            return False
        arrived = self._worker.world.mailbox.receive(Response)
        for turn in arrived:
            self._play(turn)
        return bool(arrived)

    def close(self) -> None:
        self._envs.clear()

    def _play(self, turn: Response) -> None:
        config = self._worker.config.env
        assert config is not None
        self._worker.world.trace.enter(f"environment {config.name}")
        reward, score, metrics, error, observation, ended = 0.0, 0.0, {}, "", "", True
        try:
            if turn.sample not in self._envs:
                self._envs[turn.sample] = make_env(config, json.loads(turn.meta))
                self._envs[turn.sample].reset(self._worker.config.seed + split_sample_id(turn.sample)[0])
            observation, gained, terminated, truncated, info = self._envs[turn.sample].step(turn.text)
            before, turns = self._totals.get(turn.sample, (0.0, 0))
            reward, turns = before + gained, turns + 1
            self._totals[turn.sample] = (reward, turns)
            metrics = {name: float(value) for name, value in info.get("metrics", {}).items()}
            score = float(metrics.get("success", reward))
            ended = terminated or truncated or turns >= config.max_turns or turn.reason == "length"
        except (Exception, SystemExit) as failure:  # one bad environment is data, not a crash
            error = f"environment {config.name}: {type(failure).__name__}: {failure}"
        token_ids = np.empty(0, dtype=np.int32) if ended else self._observation_ids(observation)
        if ended:
            self._envs.pop(turn.sample, None)
            self._totals.pop(turn.sample, None)
        else:
            self._worker.world.mailbox.send(turn.reply_to, [TurnDelta(turn.sample, token_ids.tobytes())])
        result = ScoredSample(turn.sample, reward, score, error, metrics)
        self._worker.emit(Observed(turn.sample, ended, result))
        self._worker.world.trace.enter("idle")

    def _observation_ids(self, observation: str) -> np.ndarray:
        """The tokens between two model turns: the user turn with the observation, up to the model's next word."""
        tokenizer = self._worker.tokenizer
        if tokenizer.chat_template is None:
            return np.array(tokenizer.encode(observation, add_special_tokens=False), dtype=np.int32)
        # The template is rendered around a marker turn, so that whatever closes a model turn is kept.
        marker = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        before = tokenizer.apply_chat_template(marker, tokenize=False)
        turn = [*marker, {"role": "user", "content": observation}]
        after = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        text = after[len(before) :] if after.startswith(before) else observation
        return np.array(tokenizer.encode("\n" + text, add_special_tokens=False), dtype=np.int32)
