"""Messages that start samples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from hpcrl.messaging import messages
from hpcrl.rollout.types import Prompt, is_greedy, sampling_seed, split_sample_id

PAYLOAD_BYTES = 1 << 20


def admissions(
    samples: Sequence[int], prompts: Mapping[int, Prompt], sampling: messages.Sampling, seed: int
) -> Iterator[messages.Admit]:
    """Admit messages of about 1 MiB, or larger for a single larger prompt. Adjacent samples of a prompt share a
    message. Greedy samples come last, in separate messages."""
    greedy = [sample for sample in samples if is_greedy(sample)]
    sampled = [sample for sample in samples if not is_greedy(sample)]
    plain = msgspec.structs.replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    yield from _admissions(sampled, prompts, sampling, seed)
    yield from _admissions(greedy, prompts, plain, seed)


def _admissions(
    samples: Sequence[int], prompts: Mapping[int, Prompt], sampling: messages.Sampling, seed: int
) -> Iterator[messages.Admit]:
    payloads: dict[int, messages.PromptPayload] = {}
    batch: list[tuple[int, int]] = []
    size = 0
    for sample in samples:
        uid = split_sample_id(sample)[0]
        if prompts and uid not in payloads:
            payload = _payload(prompts[uid])
            added = _num_bytes(payload)
            if size + added > PAYLOAD_BYTES and batch:
                yield messages.Admit(list(payloads.values()), batch, sampling)
                payloads, batch, size = {}, [], 0
            payloads[uid] = payload
            size += added
        batch.append((sample, sampling_seed(seed, sample)))
    if batch:
        yield messages.Admit(list(payloads.values()), batch, sampling)


def _payload(prompt: Prompt) -> messages.PromptPayload:
    told = {"prompt": prompt.text, "answer": prompt.answer, "extra": prompt.extra}
    told |= {"messages": prompt.messages, "tools": prompt.tools}
    meta = json.dumps(told, ensure_ascii=False, separators=(",", ":"))  # hpcrl.data.rows computes its size
    token_ids = np.array(prompt.token_ids, dtype=np.int32).tobytes()
    return messages.PromptPayload(prompt.uid, prompt.domain, token_ids, meta.encode(), prompt.media)


def _num_bytes(payload: messages.PromptPayload) -> int:
    return len(payload.token_ids) + len(payload.meta) + sum(len(medium.content) for medium in payload.media)
