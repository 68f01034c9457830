"""A small run with rollouts of hpcrl's own writer, whose values are known, for the section of samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hpcrl.rollout.batch import batch_from_samples
from hpcrl.rollout.store import OutcomeRecord, write_outcomes, write_rollouts
from hpcrl.rollout.types import FinishReason, PromptOutcome, Sample, make_sample_id
from hpcrl.spec.media import Medium

PROMPT = "add: 1 2"
HOSTILE = "</script><script>window.attacked = 1</script><img src=x onerror=alert(1)>\u2028\x1b[31m\u202eabc"


def make_run(folder: Path) -> Path:
    """A run folder with the tokenizer of bytes."""
    (folder / "model").mkdir(parents=True)
    (folder / "config.yaml").write_text("run_name: x\npipeline: rlvr\nmodel: {path: null}\n")
    byte_tokenizer().save(str(folder / "model/tokenizer.json"))
    return folder


def byte_tokenizer() -> Tokenizer:
    """Token i is the i-th of the 256 bytes in the tokenizer's alphabet, so `é` has two tokens."""
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def sample(
    uid: int, member: int, turns: Sequence[str], reward: float, prompt: str = PROMPT, version: int = 0, **more: Any
) -> Sample:
    """A sample of these turns, between which the user says "more"."""
    ids, turn_ids, model = [], [], []
    encode = byte_tokenizer().encode
    said = [(prompt, -1)]
    for turn, text in enumerate(turns):
        said += [(text, turn), *([("more", turn)] if turn + 1 < len(turns) else [])]
    for number, (text, turn) in enumerate(said):
        new = encode(text).ids
        ids += new
        turn_ids += [turn] * len(new)
        model += [number % 2 == 1] * len(new)
    messages = [
        {"role": "user" if place % 2 == 0 else "assistant", "content": text} for place, (text, _) in enumerate(said)
    ]
    mask = np.array(model)
    return Sample(
        id=make_sample_id(uid, 0, member),
        token_ids=np.array(ids, np.int32),
        loss_mask=mask,
        gen_logprobs=np.where(mask, -1.0, 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        turn_ids=np.array(turn_ids, np.int32),
        finish_reason=more.pop("finish", FinishReason.STOP),
        reward=reward,
        score=reward,
        messages=more.pop("messages", messages),
        **more,
    )


def write_step(
    run: Path,
    step: int,
    samples: Sequence[Sample],
    records: Sequence[OutcomeRecord] | None = None,
    advantage: float = 0.5,
    media: Mapping[bytes, bytes] | None = None,
) -> None:
    """Write a step as two ranks do that hold every second sample. The trainer's log-prob of the model's n-th token in a
    row is .001 x n above the generator's."""
    folder = run / f"rollouts/step_{step:06d}"
    for rank in range(2):
        mine = samples[rank::2]
        batch = batch_from_samples(mine, [one.id >> 24 for one in mine])
        if all(one.messages for one in mine):
            batch.texts["messages"] = [one.text().decode() for one in mine]
        batch.pictures = dict(media or {})
        mask = batch.loss_mask.long()
        counts = torch.cat([part.cumsum(0) for part in mask.split(batch.lengths.tolist())]) if len(mine) else mask
        batch.old_logprobs = batch.gen_logprobs + 0.001 * (counts * mask)
        batch.advantages = advantage * mask
        batch.token_rewards = torch.zeros(batch.num_tokens)
        write_rollouts(folder, rank, 2, batch, {"step": step, "weight_version": step - 1})
    write_outcomes(folder, trained(samples) if records is None else records)


def trained(samples: Sequence[Sample]) -> list[OutcomeRecord]:
    """The records of these samples' prompts."""
    rewards: dict[int, list[float]] = {}
    for one in samples:
        rewards.setdefault(one.id >> 24, []).append(one.reward)
    told = {"outcome": PromptOutcome.TRAINED, "domain": "sums"}
    return [OutcomeRecord(uid, 0, rewards=tuple(each), **told) for uid, each in rewards.items()]  # type: ignore[arg-type]


def write_validation(
    run: Path, step: int, rows: Sequence[Mapping[str, Any]], head: Mapping[str, Any] | None = None
) -> Path:
    """A file of validation responses."""
    path = run / f"validation/step_{step:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = [head or {"format": 1, "model": "m", "step": step, "sets": {}}, *rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answered(number: int, response: str, score: float, **more: Any) -> dict[str, Any]:
    """A line of such a file."""
    asked = [{"role": "user", "content": f"question {number}"}]
    line = {"set": "sums", "prompt_id": f"{number:016x}", "sample": 0, "greedy": True, "prompt": asked, "row": number}
    told = {
        "response": response,
        "score": score,
        "rewards": {},
        "answer": "3",
        "tokens": len(response),
        "truncated": False,
    }
    return {**line, **told, "error": None, "tags": [], **more}


def picture(value: int, start: int = 0) -> Medium:
    """A grey picture of 4 x 2 pixels."""
    return Medium("image", bytes([value]) * 24, 4, 2, start, 2)
