"""A reward's worker process, `python -m hpcrl.rewards.serving.worker PARENT_PID`.

It reads its RewardConfig and then chunks of responses from a pipe, and writes scores to another pipe. It imports
neither torch nor rank code, sends user code's output to the rank's log, and dies with its parent.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import msgspec

from hpcrl.config import RewardConfig
from hpcrl.rewards.reward import Reward, RewardItem, Score, make_reward
from hpcrl.rewards.serving.guarded import score_each, score_each_async, sendable
from hpcrl.rewards.serving.protocol import LENGTH, Answer, Begin, ItemScore, Ready, pack, read_chunk
from hpcrl.system import log
from hpcrl.system.signals import die_with, let_signals_pass
from hpcrl.system.stacks import new_page, register_stacks

MAX_EXTRACTED_CHARS = 200


def main() -> None:
    """Serve until the pipe is closed."""
    die_with(int(sys.argv[1]))
    let_signals_pass()
    register_stacks(new_page())
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    log.start_child()
    begin = msgspec.msgpack.decode(_read(source) or b"", type=Begin)
    config = RewardConfig.model_validate_json(begin.section)
    try:
        reward = make_reward(config)
        reward.connect(begin.services)
        reward.start()
    except ValueError as error:
        _write(sink, Ready(error=" ".join(str(error).split())))
        return
    _write(sink, Ready(reward.batched, reward.scores, reward.pool, reward.pure))
    if reward.pool == "async":
        asyncio.run(_serve_async(reward, config.timeout_s, source, sink))
    else:
        _serve(reward, source, sink)


def _serve(reward: Reward, source: BinaryIO, sink: BinaryIO) -> None:
    together = reward.batched or reward.scores == "groups"
    place = 0
    while body := _read(source):
        items = read_chunk(body)
        for chunk in [items] if together else [[item] for item in items]:
            _answer(score_each(reward, chunk), place, sink)
            place += len(chunk)


async def _serve_async(reward: Reward, timeout_s: float, source: BinaryIO, sink: BinaryIO) -> None:
    """Every message is one call. Calls run concurrently; the rank limits their number."""
    calls: set[asyncio.Task[None]] = set()

    async def call(items: list[RewardItem], place: int) -> None:
        _answer(await score_each_async(reward, items, timeout_s), place, sink)

    place = 0
    with ThreadPoolExecutor(1) as reader:
        while body := await asyncio.get_running_loop().run_in_executor(reader, _read, source):
            items = read_chunk(body)
            task = asyncio.create_task(call(items, place))
            calls.add(task)
            task.add_done_callback(calls.discard)
            place += len(items)


def _answer(scores: list[Score] | None, first: int, sink: BinaryIO) -> None:
    if scores is None:
        _write(sink, ItemScore(None))
        return
    for place, score in enumerate(scores, first):
        parts = list(score.turn_rewards), dict(score.token_rewards), _shortened(score.extracted)
        _write(sink, ItemScore(place, score.reward, score.score, score.error, score.metrics, *parts))


def _shortened(extracted: str | None) -> str | None:
    """An extracted answer, or its hash if it is long, since answers are only compared with each other."""
    if extracted is None:
        return None
    if len(extracted) <= MAX_EXTRACTED_CHARS:
        return sendable(extracted)
    return hashlib.sha256(extracted.encode(errors="surrogatepass")).hexdigest()


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _write(sink: BinaryIO, message: Answer) -> None:
    sink.write(pack(message))
    sink.flush()


if __name__ == "__main__":
    main()
