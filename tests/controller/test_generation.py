"""Drawing, scoring and recording by a configuration, with scripted ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, EvalSampling
from hpcrl.controller.clients import RolloutTransfer
from hpcrl.controller.evaluation import Evaluation
from hpcrl.controller.generation import evaluation_sampling, replica_capacity, training_sampling
from hpcrl.controller.rollouts import Rollouts
from hpcrl.data import PromptSource
from hpcrl.data.identity import prompt_id
from hpcrl.messaging.messages import Admit
from hpcrl.metrics.responses import read_responses, response_stats
from hpcrl.metrics.stats import flatten
from hpcrl.rollout.loop import RolloutLoop
from hpcrl.rollout.store import RolloutReader
from hpcrl.rollout.types import MAX_VALIDATION_ROWS, PromptOutcome, split_sample_id
from hpcrl.run_folder import OWNERS, SupersededError, check_owner, open_run
from hpcrl.system.files import steps_in
from tests.rollout.ranks import Ranks

ROLES = ("trainer", "generator", "reference", "reward", "env")
SINGLE = {role: {"num_ranks": None, "colocate_with": "controller"} for role in ROLES}
NUM_ROWS = 8


class Words:
    """A tokenizer with one token per word."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text.split())))}


def configure(folder: Path, **sections: dict[str, Any]) -> Config:
    """A run of one rank on a few rows of two words each."""
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"row {n}", "answer": "x"}) + "\n" for n in range(NUM_ROWS)))
    data = {"train": str(path), "val": str(path)} | sections.pop("data", {})
    return Config.model_validate({"layout": SINGLE, "data": data, **sections})


def make_loop(config: Config, ranks: Any) -> RolloutLoop:
    free = [0] if config.rollout.max_staleness else []
    return RolloutLoop(
        ranks, [[0]], [0], [], seed=0, decode_chunk_tokens=4, deterministic=config.deterministic, free=free
    )


def make_evaluation(config: Config, ranks: Any, folder: Path) -> Evaluation:
    return Evaluation(make_loop(config, ranks), ranks, RoleLayout.from_config(config), config, Words(), folder)


def make_rollouts(config: Config, ranks: Any, folder: Path, fence: Callable[[], None] = lambda: None) -> Rollouts:
    source = PromptSource(config.data, "train", Words(), config.seed, config.rollout.num_prompts)
    layout = RoleLayout.from_config(config)
    transfer_group, replicas = RolloutTransfer(ranks, layout), replica_capacity(config, layout)
    return Rollouts(make_loop(config, ranks), transfer_group, replicas, config, source, folder, fence)


def test_evaluation_truncates_sampling_only_at_the_training_temperature(tmp_path: Path) -> None:
    config = configure(tmp_path, rollout={"temperature": 0.6, "top_p": 0.9, "top_k": 20, "stop": ["\n"]})
    assert training_sampling(config).truncates
    assert evaluation_sampling(config, EvalSampling(1, 0.6, None)) == training_sampling(config)
    assert evaluation_sampling(config, EvalSampling(1, 0.6, 9)).max_new_tokens == 9
    for temperature in (0.0, 1.0):
        sampling = evaluation_sampling(config, EvalSampling(1, temperature, None))
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (temperature, 1.0, 0, ["\n"])
        assert not sampling.truncates


def test_validation_prompts_that_are_all_too_long_are_an_error(tmp_path: Path) -> None:
    config = configure(tmp_path, data={"max_prompt_tokens": 1})
    with pytest.raises(
        ValueError, match=r"data\.val: all 8 prompts have more than data\.max_prompt_tokens=1 tokens; .*"
    ):
        make_evaluation(config, Ranks(), tmp_path)


def test_a_validation_prompt_without_a_reward_scores_zero(tmp_path: Path) -> None:
    """Its reward always fails, and the evaluation must not retry forever."""
    config = configure(tmp_path, eval={"num_examples": 0})
    ranks = Ranks(score=lambda sample: (0.0, "timeout") if split_sample_id(sample)[0] % NUM_ROWS == 3 else (1.0, ""))
    stats = make_evaluation(config, ranks, tmp_path).scores(5)
    assert stats["val/score/*"] == (NUM_ROWS - 1, NUM_ROWS, 0.0, 1.0)


def test_a_set_has_its_own_prompts_responses_and_temperature(tmp_path: Path) -> None:
    """Three prompts of b get four responses each, of which the member's number decides reward and answer; a has no
    settings of its own."""

    def score(sample: int) -> tuple[float, str, str | None]:
        uid, _, member = split_sample_id(sample)
        if uid % MAX_VALIDATION_ROWS in (0, 2):  # the domains in turn until a has its prompts: a, b, a, b, b
            return 1.0, "", "a"
        return (1.0, "", "right") if member < 2 else (0.0, "", None if member == 3 else "wrong")

    rows = [{"prompt": f"row {n}", "answer": "x", "tag": "ab"[n % 2]} for n in range(10)]
    (path := tmp_path / "both.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"b": {"num_prompts": 3, "samples": 4, "temperature": 0.5, "max_new_tokens": 7}}
    evaluation = {"num_examples": 0, "num_prompts": 2, "sets": own}
    ranks = Ranks(score=score)
    config = configure(tmp_path, data={"val": str(path)}, eval=evaluation)
    stats = flatten(make_evaluation(config, ranks, tmp_path).scores(5))
    admitted = [command for _, command in ranks.sent if isinstance(command, Admit)]
    asked = {(c.sampling.temperature, c.sampling.max_new_tokens, len(c.samples)) for c in admitted}
    assert asked == {(0.0, 256, 2), (0.5, 7, 12), (1.0, 256, 2)}  # the last one: val/sampled, of a only
    assert stats["val/a/score"] == 1 and stats["val/b/score"] == 0.5 and stats["val/score/mean"] == (2 + 6) / 14
    assert stats["val/b/pass@2"] == pytest.approx(1 - 1 / 6) and stats["val/b/pass@4"] == stats["val/b/maj@4"] == 1
    assert stats["val/a/score_stderr"] == stats["val/b/score_stderr"] == 0 and "val/score_stderr" not in stats
    assert not [name for name in stats if name.startswith(("val/a/pass", "val/pass", "val/maj", "val/sampled/b"))]
    assert stats["val/sampled/score/mean"] == 1 and stats["val/truncated"] == 0
    head, written = read_responses(tmp_path / "validation" / "step_000005.jsonl")
    sets = {"a": {"temperature": 0.0, "samples": 1, "max_new_tokens": 256, "path": str(path)}}
    sets["b"] = {"temperature": 0.5, "samples": 4, "max_new_tokens": 7, "path": str(path)}
    assert head == {"format": 1, "model": "tiny", "step": 5, "sets": sets}
    kept = [(row["set"], row["row"], row["sample"], row["score"], row["answer"]) for row in written]
    of_b = [(1.0, "right"), (1.0, "right"), (0.0, "wrong"), (0.0, None)]
    assert kept[:2] == [("a", 0, 0, 1.0, "a"), ("b", 0, 0, 1.0, "right")], "as many as in val/score, none twice"
    assert kept[-4:] == [("b", 2, k, *told) for k, told in enumerate(of_b)] and len(kept) == 2 + 3 * 4
    assert [row["greedy"] for row in written if row["set"] == "a"] == [True, True]
    assert written[0]["prompt"] == [{"role": "user", "content": "row 0"}] and written[0]["response"].startswith("text ")
    assert {row["prompt_id"] for row in written[1:5]} == {prompt_id(written[1]["prompt"])}
    told = flatten(response_stats("val", written))
    assert told == {name: stats[name] for name in told} and "val/b/maj@4" in told, "the file has all there is to know"


def test_a_file_of_responses_that_cannot_be_written_costs_the_file_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "validation").write_text("a file")
    stats = make_evaluation(configure(tmp_path, eval={"num_examples": 0}), Ranks(), tmp_path).scores(5)
    assert stats["val/score/*"].count == NUM_ROWS
    assert "the file of validation responses could not be made: FileExistsError" in caplog.text


def test_the_rewards_of_filtered_groups_are_recorded(tmp_path: Path) -> None:
    """Every third prompt has only right answers; the others have one right and one wrong answer."""

    def score(sample: int) -> tuple[float, str]:
        uid, _, member = split_sample_id(sample)
        return float(uid % 3 == 0 or member == 0), ""

    config = configure(tmp_path, rollout={"num_prompts": 4, "group_size": 2, "filter_std": True})
    rollouts = make_rollouts(config, Ranks(score=score), tmp_path)
    batch = rollouts.next(1)
    rollouts.store(batch, cast(Any, SimpleNamespace(write_rollouts=lambda *_: lambda: None)))
    records = {record.uid: record for record in RolloutReader(tmp_path, provisional=True).outcomes()}
    assert {uid: (r.outcome, r.rewards) for uid, r in records.items()} == {
        uid: (PromptOutcome.FILTERED, (1.0, 1.0)) if uid % 3 == 0 else (PromptOutcome.TRAINED, (1.0, 0.0))
        for uid in range(6)
    }


def test_replicas_generate_while_a_batch_that_was_complete_at_once_is_trained(tmp_path: Path) -> None:
    """The second step's batch is complete when the step begins; requests that the step adds must not wait for the
    third."""
    config = configure(tmp_path, rollout={"num_prompts": 4, "group_size": 2, "max_staleness": 1})
    rollouts, admitted = make_rollouts(config, ranks := Ranks(), tmp_path), []
    for step in (1, 2, 3):
        del ranks.sent[:]
        rollouts.next(step)
        kinds = [type(command).__name__ for _, command in ranks.sent]
        admitted.append("Admit" in kinds)
        assert kinds.count("Admit") == 0 or "DecodeChunk" in kinds[kinds.index("Admit") :], kinds
    assert admitted[1], "the second step adds nothing, so this shows nothing"


def test_a_superseded_attempt_writes_no_rollouts(tmp_path: Path) -> None:
    config = configure(tmp_path, rollout={"num_prompts": 4, "group_size": 2})
    open_run(config.model_dump(mode="json"), tmp_path / "run", "auto")
    rollouts = make_rollouts(config, Ranks(), tmp_path / "run", partial(check_owner, tmp_path / "run", 1))
    trainer = cast(Any, SimpleNamespace(write_rollouts=lambda *_: lambda: None))
    rollouts.store(rollouts.next(1), trainer)
    batch = rollouts.next(2)
    (tmp_path / "run" / OWNERS / "0002").write_text("{}")
    with pytest.raises(SupersededError):
        rollouts.store(batch, trainer)
    assert steps_in(tmp_path / "run" / "rollouts") == [1]


def test_a_resume_restores_the_prompts_of_groups_finished_ahead(tmp_path: Path) -> None:
    config = configure(tmp_path, rollout={"num_prompts": 2, "group_size": 2, "max_staleness": 1.0})
    rollouts = make_rollouts(config, Ranks(), tmp_path)
    rollouts.next(1)
    state = json.loads(json.dumps(rollouts.state_dict()))
    ahead = [group["uid"] for group in state["scheduler"]["finished"]]
    assert len(ahead) == 2
    resumed = make_rollouts(config, Ranks(), tmp_path)
    resumed.load_state_dict(state)
    assert resumed._prompts == rollouts._prompts
    assert set(ahead) <= resumed._prompts.keys()
