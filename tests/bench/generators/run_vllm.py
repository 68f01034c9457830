"""The vLLM side of the generator bench, in a process of its own: a job as JSON in argv, one run per line of stdin."""

from __future__ import annotations

import json
import os
import sys
import time

# Before vllm is imported: one thread, in this process, a small KV cache.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(sys.argv[1])
    engine = LLM(
        job["model"],
        dtype=job["dtype"],
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=len(job["prompts"]),
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, temperature=1.0, logprobs=0, seed=i, detokenize=False)
        for i, length in enumerate(job["lengths"])
    ]
    for _ in sys.stdin:
        start = time.process_time()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.process_time() - start
        assert [len(o.outputs[0].token_ids) for o in outputs] == job["lengths"]
        print(f"\nRATE {sum(job['lengths']) / seconds}", flush=True)
    os._exit(0)  # the in-process engine does not come down by itself


if __name__ == "__main__":
    main()
