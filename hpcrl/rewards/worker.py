"""A reward's worker process, `python -m hpcrl.rewards.worker PARENT_PID`.

It reads its RewardConfig (JSON), then chunks of responses from a pipe, and writes scores to another. It imports neither
torch nor anything of a rank, what user code prints goes to the rank's log, and it dies with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import BinaryIO

import msgspec

from hpcrl.config import RewardConfig
from hpcrl.rewards import make_reward
from hpcrl.rewards.base import Reward, RewardItem
from hpcrl.rewards.guarded import score_each
from hpcrl.rewards.protocol import LENGTH, Answer, Item, Ready, Scored, pack
from hpcrl.signals import let_signals_pass

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the pipe ends."""
    _die_with(int(sys.argv[1]))
    let_signals_pass()
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    config = RewardConfig.model_validate_json(_read(source) or b"")
    try:
        reward = make_reward(config)
    except ValueError as error:
        _write(sink, Ready(error=" ".join(str(error).split())))
        return
    _write(sink, Ready(batched=reward.batched))
    while body := _read(source):
        items = [RewardItem(*msgspec.structs.astuple(item)) for item in msgspec.msgpack.decode(body, type=list[Item])]
        chunks = [items] if reward.batched else [[item] for item in items]
        first = 0
        for chunk in chunks:
            _answer(reward, chunk, first, sink)
            first += len(chunk)


def _answer(reward: Reward, items: list[RewardItem], first: int, sink: BinaryIO) -> None:
    scores = score_each(reward, items)
    if scores is None:
        _write(sink, Scored(None))
        return
    for place, score in enumerate(scores, first):
        _write(sink, Scored(place, score.reward, score.score, score.error, score.metrics))


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _write(sink: BinaryIO, message: Answer) -> None:
    sink.write(pack(message))
    sink.flush()


if __name__ == "__main__":
    main()
