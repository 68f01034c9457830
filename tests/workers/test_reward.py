"""The reward role with rewards that score groups."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from hpcrl.cluster.layout import RoleLayout
from hpcrl.messaging import messages as m
from hpcrl.messaging.world import rank_queue
from hpcrl.rollout.types import TOKEN_REWARD, make_sample_id
from hpcrl.spec.media import Medium
from hpcrl.workers.reward import RewardRole, item_of
from tests.dist.conftest import Threads
from tests.workers.conftest import LAYOUT, Stage

REWARDS = Path(__file__).parents[1] / "rewards" / "user_rewards.py"


def test_responses_to_a_prompt_share_its_images(stage: Stage) -> None:
    """Each message brings a copy. The rank keeps no image after the last response."""
    meta = json.dumps({"prompt": "?", "answer": "4", "extra": {}}).encode()
    role = RewardRole(stage.worker(2, {"reward": {"default": {"name": "math"}}}))
    try:
        copies = [Medium("image", bytes(bytearray(range(12))), 2, 2, 3, 1) for _ in range(2)]
        posts = [m.Response(n, "d", "4", meta, "stop", media=(copy,)) for n, copy in enumerate(copies)]
        first, second = (role._shared(item_of(post)) for post in posts)
        assert copies[0] is not copies[1] and first.images[0] is second.images[0] is copies[0]
        assert len(role._images) == 1
        del first, second, posts, copies
        assert not role._images
    finally:
        role.close()


def test_a_reward_rank_keeps_responses_until_their_group_is_named(threads: Threads, stage: Stage) -> None:
    world, events = threads.worlds[2], threads.worlds[0].events
    reward = {"default": {"name": "function", "function": f"{REWARDS}:longest_in_parts", "timeout_s": 60}}
    worker = stage.worker(2, {"reward": reward})
    worker.layout = RoleLayout(MappingProxyType(dict(LAYOUT) | {"env": (), "reward": (2,)}), 3)
    serving = threading.Thread(target=worker.serve)
    serving.start()

    def next_event(kind: type) -> Any:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            message = events.get(0.5)
            if message is not None and isinstance(message[2], kind):
                return message[2]
        raise AssertionError(f"no {kind.__name__}")

    send = lambda command: threads.worlds[0].sender.send(rank_queue(2), command)  # noqa: E731
    try:
        send(m.BuildRole("reward", [2]))
        next_event(m.Done)
        meta = json.dumps({"prompt": "?", "answer": "4", "extra": {}}).encode()
        samples = [make_sample_id(7, 0, member) for member in range(3)]
        texts = dict(zip(samples, ("a", "bbb", "cc"), strict=True))
        ids = np.arange(4, dtype=np.int32).tobytes()
        earlier = [("first", ids)]
        posts = [m.Response(sample, "maths", text, meta, "stop", ids, earlier) for sample, text in texts.items()]
        stage.send(1, 2, posts)
        assert next_event(m.AwaitGroup).samples == samples
        send(m.DropAwaiting(samples[:1]))
        send(m.ScoreGroup(samples[1:]))
        scored: list[m.ScoredSample] = []
        while len(scored) < 2:  # the pool's answers may come in two messages
            scored += next_event(m.Scored).samples
        assert {each.sample: each.reward for each in scored} == {samples[1]: 1.0, samples[2]: 0.0}
        won, lost = sorted(scored, key=lambda each: each.sample)
        assert np.frombuffer(won.token_rewards, TOKEN_REWARD).tolist() == [(3, 0.25), (7, 0.75)]
        assert won.turn_rewards == [0.25, 0.75], "what its tokens make of them"
        assert (lost.turn_rewards, lost.token_rewards) == ([0.5, -0.5], b"")
        assert worker.roles["reward"]._held == {}
    finally:
        send(m.Shutdown())
        serving.join(20)
        worker.close()
    assert not serving.is_alive() and world is worker.world
