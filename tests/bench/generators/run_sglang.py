"""The SGLang side of the generator bench, in a process of its own: a job as JSON in argv, one run per line of stdin."""

from __future__ import annotations

import json
import os
import sys

import psutil

from tests.contracts.gen.sglang import ENVIRONMENT, OPTIONS

os.environ |= ENVIRONMENT | {"OMP_NUM_THREADS": "1"}  # before sglang is imported


def used() -> float:
    """CPU-seconds of this process and SGLang's others."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True)))


def main() -> None:
    from sglang import Engine

    job = json.loads(sys.argv[1])
    engine = Engine(
        model_path=job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        context_length=512,
        max_running_requests=len(job["prompts"]),
        max_total_tokens=512 * len(job["prompts"]),
        disable_radix_cache=True,
        sleep_on_idle=True,
        **OPTIONS,
    )
    params = [{"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0} for length in job["lengths"]]
    for _ in sys.stdin:
        start = used()
        answers = engine.generate(input_ids=job["prompts"], sampling_params=params, return_logprob=True)
        seconds = used() - start
        assert [len(answer["output_ids"]) for answer in answers] == job["lengths"]
        print(f"\nRATE {sum(job['lengths']) / seconds}", flush=True)
    engine.shutdown()


if __name__ == "__main__":  # SGLang starts its processes anew from this file
    main()
