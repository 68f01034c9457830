"""Verdicts of a judge rank per second and CPU-second, with 1 and with 32 requests in flight. Prints one JSON line.

    python -m tests.bench.judge

The judge is a model of 4 layers of 256 with random weights and 32 slots, whose answers have 32 tokens: measured is
its engine, driven by a rank's loop, behind HTTP, with the client of the reward in threads of the same process.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from hpcrl.config import TinyModel, parse
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.metrics.stats import flatten
from hpcrl.rewards.builtin.judge_prompt import FIELDS, TEMPLATE, Scale, messages
from hpcrl.rewards.serving.endpoint import Endpoint, content_of
from hpcrl.workers.judge import JudgeRole
from tests.bench.machine import tell

SIZES = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 768}
TOKENS, QUESTIONS = 32, {1: 16, 32: 128}
"""Of an answer; requests in flight -> questions."""


def rate(role: JudgeRole, in_flight: int) -> dict[str, float]:
    """Verdicts per second and per CPU-second of this process, and the share of slots in use."""
    endpoint = Endpoint([f"{role.url}/v1/chat/completions"], timeout_s=600, backoff_s=1, token="bench")

    def ask(number: int) -> None:
        material = dict.fromkeys(FIELDS, "") | {"response": f"answer {number} of {in_flight}"}
        asked, _ = messages(TEMPLATE, material, Scale(0, 10), 1000)
        content_of(endpoint.ask({"messages": asked, "max_tokens": TOKENS}, time.monotonic() + 600, Counter()))

    role.answer("load", {})
    started, used = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(in_flight) as threads:
        list(threads.map(ask, range(QUESTIONS[in_flight])))
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    slots = flatten(role.answer("load", {}))["judge/slots_used"]
    rates = {"per_s": QUESTIONS[in_flight] / seconds, "per_cpu_s": QUESTIONS[in_flight] / cpu, "slots_used": slots}
    return {f"{name}_{in_flight}": round(value, 2) for name, value in rates.items()}


def main() -> None:
    """Print the JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "judge"
        make_tiny_model(TinyModel(**SIZES), path)
        section = {"path": str(path), "max_prompt_tokens": 1500, "max_new_tokens": TOKENS}
        config = parse({"data": {"train": "rows.jsonl"}, "judge": section})
        wakeup = threading.Event()
        server = SimpleNamespace(wakeup=wakeup)
        world = SimpleNamespace(rank=0, address="127.0.0.1", token="bench", mailbox_server=server)
        role = JudgeRole(SimpleNamespace(config=config, world=world))  # type: ignore[arg-type]
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                if not role.poll():
                    wakeup.wait(0.05)
                    wakeup.clear()

        loop = threading.Thread(target=work)
        loop.start()
        rate(role, 1)
        found = rate(role, 1) | rate(role, 32)
        ended.set()
        loop.join()
        role.close()
    tell({"bench": "judge", "answer_tokens": TOKENS, **found})


if __name__ == "__main__":
    main()
