"""The demonstration in small, as a user runs it: a model learns, and the run folder holds what the README says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.rollout.types import Disposition

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 30
METRICS = """
critic/score/mean critic/rewards/mean critic/advantages/max critic/returns/min critic/entropy/mean actor/lr
actor/pg_loss actor/total_loss actor/approxkl actor/ratio_mean actor/clipfrac actor/grad_norm actor/valid_sample_ratio
actor/train_infer_ratio_token_mean actor/train_infer_diff_token_mean actor/train_infer_ratio_geometric_mean
actor/train_infer_ratio_sequence_mean token/prompt_length/mean token/response_length/max token/total_length/min
token/response_length/clip_ratio group/all_correct_ratio group/all_incorrect_ratio group/mixed_ratio
system/global_step system/samples system/tps time/step_total time/step_generate time/step_train
time/step_model_update time/old_log_probs scheduler/off_policy_ratio scheduler/group_filter_count
scheduler/query_use_count sort_digits/score
""".split()  # noqa: SIM905


def launch(*words: str) -> str:
    """Run the launcher to its end; its output."""
    done = subprocess.run(
        [sys.executable, "-m", "hpcrl.launch", *words], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of a GRPO run from a warm start.

    The warm-up ends as the demonstration's does, at a score. After a number of steps it stands anywhere between .06 and
    .20, by the seed and the processor's instructions: accuracy jumps from step to step at its learning rate.
    """
    folder = tmp_path_factory.mktemp("learning")
    launch("+experiment=demo_sft", f"run_dir={folder / 'sft'}", "save_every=0")
    words = [f"model.path={folder / 'sft' / 'hf'}", f"run_dir={folder / 'rl'}", f"max_steps={NUM_STEPS}"]
    return folder / "rl", launch("+experiment=demo", *words)


def test_held_out_accuracy_rises(trained: tuple[Path, str]) -> None:
    rows = read_metrics(trained[0])
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    before, after = rows[0], rows[-1]
    assert 0.1 < before["val/sampled/score/mean"] < 0.45, "the warm-up ends when a fifth of the samples is right"
    assert after["val/score/mean"] > before["val/score/mean"] + 0.1
    assert after["val/sampled/score/mean"] > before["val/sampled/score/mean"] + 0.12


def test_every_metric_of_the_field_is_there(trained: tuple[Path, str]) -> None:
    last = read_metrics(trained[0])[-1]
    assert [name for name in METRICS if name not in last] == []


def test_an_evaluation_is_no_part_of_its_step(trained: tuple[Path, str]) -> None:
    first = read_metrics(trained[0])[0]  # before the first step there is hardly anything else
    assert 0 < first["time/step_total"] < first["time/val_step"]


def test_generator_and_trainer_agree(trained: tuple[Path, str]) -> None:
    batch = RolloutReader(trained[0]).batch(NUM_STEPS)
    difference = (batch.old_logprobs - batch.gen_logprobs)[batch.loss_mask].abs().max()
    assert difference < 1e-4
    assert (batch.versions[batch.loss_mask] == NUM_STEPS - 1).all()


def test_every_prompt_has_one_disposition(trained: tuple[Path, str]) -> None:
    records = RolloutReader(trained[0]).dispositions()
    uids = [record.uid for record in records]
    assert len(set(uids)) == len(uids)
    ended = [record.disposition for record in records]
    assert ended.count(Disposition.TRAINED) == NUM_STEPS * 64
    last = read_metrics(trained[0])[-1]
    assert {d: ended.count(d) for d in Disposition} == {d: last[f"prompts/{d}"] for d in Disposition}


def test_the_export_answers_as_the_run_did(trained: tuple[Path, str]) -> None:
    folder, output = trained
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    examples = json.loads((folder / "examples.json").read_text())
    assert len(examples["0"]) == len(examples[str(NUM_STEPS)]) == 5
    for example in examples[str(NUM_STEPS)]:
        user = example["prompt"].removeprefix("user\n").removesuffix("\nassistant\n")
        chat = [{"role": "user", "content": user}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)
        response = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert response == example["response"]
    assert "before" in output and "after" in output


def test_the_folder_explains_itself(trained: tuple[Path, str]) -> None:
    folder, output = trained
    for name in (
        "config.yaml",
        "facts.json",
        "plot.png",
        "tensorboard",
        "rollouts",
        "checkpoints/LATEST",
        "finished.json",
    ):
        assert (folder / name).exists(), name
    assert len(list((folder / "logs").rglob("rank_*.log"))) == 3
    assert str(folder / "plot.png") in output
    again = launch(
        "+experiment=demo", f"model.path={folder.parent / 'sft' / 'hf'}", f"run_dir={folder}", f"max_steps={NUM_STEPS}"
    )
    assert "finished" in again.splitlines()[-1]
