"""Debug runs: only generation, only training on another run's rollouts, and everything without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import committed_step
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_STEPS = 3
SHOWN = ("actor/total_loss", "actor/grad_norm", "critic/kl", "critic/rewards/mean", "token/response_length/mean")
WORDS = f"""
max_steps={NUM_STEPS} save_every=2 rollout.num_prompts=4 rollout.group_size=4 rollout.max_new_tokens=3
data.max_prompt_tokens=32 generator.max_num_seqs=8 algorithm.num_mini_batches=2 algorithm.kl_loss_coef=0.1
trainer.lr=1e-3 reward.default.name=exact_match
""".split()


def finish(run_dir: Path, *words: str) -> Start:
    """A start that ends with exit code 0."""
    start = Start(run_dir, [*WORDS, *words])
    assert start.wait() == ExitCode.DONE, start.text
    return start


def differing(one: Path, other: Path) -> set[str]:
    """Names of weights that differ in any bit between two runs or models."""
    parts = [load_file(next(path.glob("**/model.safetensors"))) for path in (one, other)]
    return {name for name in parts[0].keys() | parts[1].keys() if not parts[0][name].equal(parts[1][name])}


@pytest.fixture(scope="module")
def inputs(digit_model: Path, digit_data: Path) -> list[str]:
    return [f"model.path={digit_model}", f"data.train={digit_data}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, inputs: list[str]) -> Path:
    """The folder of a run that generates and trains."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    finish(run_dir, *inputs, "deterministic=true")
    return run_dir


def test_train_only_on_stored_rollouts_gives_the_same_weights(tmp_path: Path, digit_model: Path, whole: Path) -> None:
    """Bit for bit on the same layout, without prompts."""
    words = [f"model.path={digit_model}", "data.train=gone.jsonl", "deterministic=true", "debug=train_only"]
    start = finish(tmp_path / "alone", *words, f"load_rollouts={whole}")
    assert "1-2     trainer, reference\n" in start.text, start.text
    assert differing(tmp_path / "alone", whole) == set() != differing(tmp_path / "alone", digit_model)
    assert not (tmp_path / "alone" / "rollouts").exists()
    for there, here in zip(read_metrics(whole)[1:], read_metrics(tmp_path / "alone")[1:], strict=True):
        assert {name: here[name] for name in SHOWN} == {name: there[name] for name in SHOWN}


def test_train_only_reads_rollouts_stored_by_other_ranks(tmp_path: Path, digit_model: Path, whole: Path) -> None:
    """One trainer and a separate reference, on rollouts of two ranks: the same losses except for the order of
    summation."""
    words = [f"model.path={digit_model}", "debug=train_only", f"load_rollouts={whole}", "layout=disaggregated"]
    finish(tmp_path / "alone", *words, "layout.trainer.num_ranks=1")
    for there, here in zip(read_metrics(whole)[1:], read_metrics(tmp_path / "alone")[1:], strict=True):
        assert {name: here[name] for name in SHOWN} == pytest.approx({name: there[name] for name in SHOWN}, rel=1e-4)


def test_rollout_only_keeps_the_weights_and_stores_the_same_first_rollouts(
    tmp_path: Path, digit_model: Path, inputs: list[str], whole: Path
) -> None:
    run_dir = tmp_path / "run"
    start = finish(run_dir, *inputs, "deterministic=true", "debug=rollout_only")
    assert "1-2     trainer, generator, reward\n" in start.text, start.text
    reader = RolloutReader(run_dir)
    assert reader.steps() == [1, 2, 3] and committed_step(run_dir) == NUM_STEPS
    assert reader.batch(1).token_ids.equal(RolloutReader(whole).batch(1).token_ids)
    versions = {int(v) for step in reader.steps() for v in reader.batch(step).versions}
    assert versions == {-1, 0} and reader.batch(3).old_logprobs is None
    rows = read_metrics(run_dir)[1:]
    assert all("critic/rewards/mean" in row and "actor/total_loss" not in row for row in rows)
    assert differing(run_dir, digit_model) == set()


def test_fake_engines_take_their_configured_time_and_all_else_works(tmp_path: Path) -> None:
    times = {"fake.train_s": 0.3, "fake.logprobs_s": 0.2, "fake.publish_s": 0.1, "fake.decode_s": 0.02}
    small = ["rollout.num_prompts=8", "save_every=1", "eval.num_prompts=8", "fake.pass_rate=0.7"]
    words = ["+experiment=rlvr_async", "debug=fake", "fake.median_tokens=2", "fake.tail=0", *small]
    start = finish(tmp_path / "run", *words, *(f"{name}={value}" for name, value in times.items()))
    assert "memory  not computed" in start.text and (tmp_path / "run" / "plot.png").exists()
    rows = read_metrics(tmp_path / "run")[1:]
    for row in rows:  # two optimizer steps per step, eight slots
        assert row["time/step_train"] >= 2 * 0.3 and row["time/old_log_probs"] >= 0.2
        assert row["time/step_update_weights"] >= 0.1 and row["system/decode_tps"] <= 8 / 0.02
        assert row["token/response_length/mean"] == 2 and 0.3 < row["critic/rewards/mean"] < 1
    assert max(row["scheduler/staleness/max"] for row in rows) == 1
    assert committed_step(tmp_path / "run") == NUM_STEPS and (tmp_path / "run/hf/model.safetensors").exists()


def test_failures_of_plots_and_kept_completions_do_not_end_a_run(tmp_path: Path) -> None:
    """Completions that the locale cannot print, and folders in place of the plot and the kept completions."""
    data, run_dir = tmp_path / "rows.jsonl", tmp_path / "run"
    rows = [{"prompt": f"\u6570 \u03c0 {n} \U0001f600", "answer": str(n)} for n in range(16)]
    data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    words = [
        *WORDS,
        "debug=fake",
        f"data.train={data}",
        f"data.val={data}",
        "eval.num_prompts=4",
        "data.max_prompt_tokens=64",
    ]
    environ = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    start = Start(run_dir, words, environ)
    start.wait_until((run_dir / "metrics.jsonl").exists)
    (run_dir / "plot.png").mkdir()
    assert start.wait() == ExitCode.DONE, start.text
    assert "hpcrl: the plot could not be made: IsADirectoryError" in start.text and "\u6570 \u03c0" in start.text
    assert committed_step(run_dir) == NUM_STEPS and (run_dir / "finished.json").exists()
    again = Start(run_dir, words, environ)
    assert again.wait() == ExitCode.DONE and "finished" in again.text, again.text


def test_a_run_folder_keeps_its_debug_mode_and_rollouts(tmp_path: Path, inputs: list[str], whole: Path) -> None:
    def refused(run_dir: Path, *words: str) -> str:
        start = Start(run_dir, [*WORDS, *words])
        assert start.wait() == ExitCode.BAD_INPUT, start.text
        return start.errors.read_text()

    changed = refused(whole, *inputs, "deterministic=true", "debug=fake")
    assert "use its values, another run_name, or resume=fresh" in changed and 'debug: "none" -> "fake"' in changed
    alone = [*inputs, "debug=train_only"]
    few = refused(tmp_path / "a", *alone, f"load_rollouts={whole}", "max_steps=9")
    assert f"max_steps: 9, but {whole} has rollouts of 3 steps; use max_steps=3" in few
    none = refused(tmp_path / "a", *alone, f"load_rollouts={tmp_path}")
    assert f"load_rollouts: {tmp_path} has no rollouts/step_000001" in none
    warm = refused(tmp_path / "a", *alone, f"load_rollouts={whole}", "rollout.temperature=0.5")
    assert "rollout.temperature: 0.5, but the rollouts of" in warm and "were drawn at 1; use 1" in warm
