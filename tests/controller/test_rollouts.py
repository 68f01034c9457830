"""Batches of several domains."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import DataConfig, DomainRolloutConfig, load
from hpcrl.controller.rollouts import Rollouts
from hpcrl.data import PromptSource
from hpcrl.rollout.scheduling.events import Decoded, Generate, Rewarded
from hpcrl.rollout.scheduling.policies import SchedulerConfig
from hpcrl.rollout.scheduling.scheduler import RolloutExhausted, RolloutScheduler
from hpcrl.rollout.types import FinishReason, Prompt, PromptOutcome, split_sample_id
from tests.rollout.ranks import Ranks
from tests.rollout.test_loop import GENERATOR, SAMPLING, draw_from, make_loop, prompts
from tests.vlm import png, seeing_tokenizer

SHARES = {"maths": 0.4, "code": 0.3, "gym": 0.2, "essays": 0.1}


class Words:
    """A tokenizer of words."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def two_in_five_filtered(sample: int) -> Any:
    uid, _, member = split_sample_id(sample)
    return float(member % 2 and uid % 5 > 1), ""


def test_a_domain_can_have_its_own_filters() -> None:
    """All rewards are equal: groups of one domain are filtered, groups of the other are not."""
    config = SchedulerConfig(2, filter_std=True, domains={"code": DomainRolloutConfig(filter_std=False)})
    kinds = {uid: "code" if uid % 2 else "maths" for uid in range(100)}
    scheduler = RolloutScheduler(config, {GENERATOR: 64}, kinds.__getitem__)
    scheduler.begin_step(0, 5)
    collected = make_loop(Ranks()).collect(scheduler, {}, draw_from(prompts()), SAMPLING)
    assert [kinds[group.uid] for group in collected.groups] == ["code"] * 5
    assert {end.reason for end in scheduler.ended_prompts() if kinds[end.uid] == "maths"} == {"std"}


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_batch_keeps_its_domain_shares_when_prompts_are_filtered(tmp_path: Path, deterministic: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p {n}", "tag": tag}) + "\n" for tag in SHARES for n in range(7)))
    rollouts = object.__new__(Rollouts)  # only its draws are tested
    data = DataConfig(train=str(path), domain_interleave_probs=SHARES)
    rollouts.source, rollouts._prompts = PromptSource(data, "train", Words(), 0, 10), {}
    config = SchedulerConfig(2, filter_std=True, deterministic=deterministic)
    rollouts.scheduler = RolloutScheduler(config, {GENERATOR: 64})
    loop, rollouts._records = make_loop(Ranks(score=two_in_five_filtered), deterministic), []
    for step in range(30):
        rollouts.scheduler.begin_step(step, 10)
        collected = loop.collect(rollouts.scheduler, rollouts._prompts, rollouts._draw, SAMPLING)
        domains = Counter(rollouts._prompts[group.uid].domain for group in collected.groups)
        assert domains == {"maths": 4, "code": 3, "gym": 2, "essays": 1}
        rollouts._record()
    counts = Counter(record.outcome for record in rollouts._records)
    assert counts[PromptOutcome.TRAINED] == 300 and counts[PromptOutcome.FILTERED] > 150


def test_rows_that_fail_when_drawn_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file may be missing on the node of rank 0 only, or later; its head may be right, and its data damaged."""
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(png(1))
    rows = [{"prompt": name, "images": [f"{name}.png"]} for name in "abc"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rollouts = object.__new__(Rollouts)  # only its draws are tested
    config = DataConfig(train=str(tmp_path / "rows.jsonl"), shuffle=False)
    rollouts.source, rollouts._prompts = PromptSource(config, "train", seeing_tokenizer(), 0, 1), {}
    rollouts.scheduler = RolloutScheduler(SchedulerConfig(2), {GENERATOR: 64})
    rollouts._records, rollouts._told_failed = [], False
    (tmp_path / "a.png").unlink()
    (tmp_path / "b.png").write_bytes(png(1)[:-30])
    for _ in range(2):
        assert [prompt.row for prompt in rollouts._draw(1)] == [2]
        rollouts._record()
    assert [record.outcome for record in rollouts._records] == [PromptOutcome.FAILED] * 4
    [line] = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(
        r"a row is left out: .*rows\.jsonl:1: images\[0\]: .*a\.png cannot be read: No such file or directory; "
        r"further ones are counted in prompts/failed",
        line,
    )


class Loop:
    """Generates at once; the responses to a prompt of the domain `hard` all have reward 0, others differ."""

    def collect(
        self,
        scheduler: RolloutScheduler,
        prompts: dict[int, Prompt],
        draw: Callable[[int], list[Prompt]],
        sampling: Any,
    ) -> None:
        while True:
            fresh = draw(scheduler.num_wanted())
            prompts.update((prompt.uid, prompt) for prompt in fresh)
            scheduler.add_prompts(prompt.uid for prompt in fresh)
            for command in scheduler.plan():
                for sample in command.sample_ids if isinstance(command, Generate) else ():
                    uid, _, member = split_sample_id(sample)
                    reward = 0.0 if prompts[uid].domain == "hard" else float(member)
                    scheduler.handle_events(
                        [Decoded(0, ((sample, 1, FinishReason.STOP),)), Rewarded(sample, reward, reward)]
                    )


def test_a_domain_that_starves_a_mix_is_named(tmp_path: Path) -> None:
    words = ["data.train=[{path:task:add,domain:hard},{path:task:add,domain:easy}]", "rollout.filter_std=true"]
    words += ["data.domain_interleave_probs={hard:.5,easy:.5}", "rollout.num_prompts=4", "rollout.group_size=2"]
    config = load(words)
    source = PromptSource(config.data, "train", Words(), 0, config.rollout.num_prompts)
    rollouts = Rollouts(Loop(), None, {0: 64}, config, source, tmp_path, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(RolloutExhausted, match=r"; prompts missing by domain \(data.domain_int.*\): hard 2$"):
        rollouts.next(1)
