"""The resources in the output of `python -m hpcrl.launch ... dry_run=true`, from a folder with only config.json."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import load
from hpcrl.launch import plan
from hpcrl.launch.__main__ import main
from hpcrl.launch.resources import node_rows, size
from hpcrl.system.exit_codes import ExitCode
from tests.planner.models import PUBLISHED

SHORT = ("data.max_prompt_tokens=2048", "rollout.max_new_tokens=16384", "eval.max_new_tokens=16384")
COMPONENTS = (
    "cluster.components={train: {roles: [controller, trainer], ranks_per_node: 8, gpus_per_node: 8}, "
    "cpu: {roles: [reward], ranks_per_node: 2}}"
)
LARGEST = (
    "+cluster=slurm",
    "cluster.time=1-12",
    COMPONENTS,
    "trainer.engine=megatron",
    "trainer.megatron.tensor_parallel=4",
    "trainer.megatron.sequence_parallel=true",
    "trainer.megatron.pipeline_parallel=8",
    "trainer.megatron.virtual_pipeline=6",
    "trainer.megatron.expert_parallel=8",
    "trainer.megatron.account_for_embedding_in_pipeline_split=true",
    "trainer.megatron.account_for_loss_in_pipeline_split=true",
    "trainer.megatron.recompute=full",
    "trainer.param_dtype=bfloat16",
    "generator.engine=vllm",
    "generator.dtype=bfloat16",
    "layout.trainer.num_ranks=256",
    "layout.generator.num_ranks=200",
    "layout.generator.tensor_parallel=8",
    "layout.reward={num_ranks: 4, colocate_with: null}",
    "rollout.num_prompts=128",
)


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    folder.mkdir()
    config = PUBLISHED[name][0] | {"max_position_embeddings": 40960} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def words(model: Path, *more: str) -> list[str]:
    return [
        "+experiment=demo",
        "cluster.device=auto",
        f"model.path={model}",
        f"run_dir={model.parent}/run",
        *SHORT,
        *more,
    ]


@pytest.mark.slow
def test_the_plan_of_256_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_config(tmp_path / "model", "Qwen3-235B-A22B")
    assert main([*words(model, *LARGEST), "dry_run=true"]) == ExitCode.DONE
    said = capsys.readouterr().out
    for line in (
        "(qwen3_moe, 235B parameters, 22.2B active)",
        "train: controller, trainer, generator; 32 node(s) with 8 GPU(s), ranks 0-256, 1,152 node-hours",
        "cpu: reward; 2 node(s) with 0 GPU(s), ranks 257-260, 72 node-hours",
        "at most 1,224 node-hours, 9,216 GPU-hours (36 h 00 min a job)",
        "tensor 4 x pipeline 8 x context 1 x data 8 = 256 ranks; experts 8 x expert tensor 1 x expert data 4",
        "layers of each stage 11 | 12 | 12 | 12 | 12 | 12 | 12 | 11 (1+2+2+2+2+2; 2+2+2+2+2+2; 2+2+2+2+2+1 by chunk)",
        "vocabulary padded to 152064",
        "rank 1-200 (trainer, generator): ",
        "rank 201-256 (trainer): ",
        "2.99 TiB a checkpoint, 27 min at 2 GB/s (cluster.storage_gb_per_s)",
    ):
        assert line in said, (line, said)
    assert "fits 80 GB and larger (10% kept free); full responses in the KV cache: 9 on 80 GB" in said
    assert "to fit 64 GB cards: " in said and "to fit 48" not in said, "the next smaller card, in a dry run"
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.slow
def test_a_plan_that_does_not_fit_advises_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_config(tmp_path / "model", "Qwen3-235B-A22B")
    largest = [word for word in LARGEST if "recompute" not in word]
    assert main([*words(model, *largest), "dry_run=true"]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert "fits none of 40 GB, 48 GB, 64 GB, 80 GB, 94 GB, 141 GB (10% kept free)" in said
    assert "to fit 80 GB cards: trainer.megatron.recompute=full\n" in said


def test_invalid_sizes_are_refused_with_their_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_config(tmp_path / "model", "Qwen3-235B-A22B")
    for wrong, text in (
        (
            ("layout.trainer.num_ranks=250", "layout.generator.num_ranks=240"),
            "tensor 4 x pipeline 8 x context 1 = 32 ranks hold the model, and the layout gives 250",
        ),
        (
            ("trainer.megatron.virtual_pipeline=5",),
            "94 layers + 2 for embedding and loss = 96 do not divide over 8 stages x 5 chunks = 40",
        ),
    ):
        assert main([*words(model, *LARGEST, *wrong), "dry_run=true"]) == ExitCode.BAD_INPUT
        said = capsys.readouterr()
        assert said.out == "" and text in said.err
    assert not (tmp_path / "run").exists()


def test_weights_may_be_missing_only_for_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_config(tmp_path / "model", "Qwen2.5-0.5B")
    assert main([*words(model, "generator.max_num_seqs=4"), "dry_run=true"]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert f"note: model.path: no weights in {model}" in said
    assert "494M parameters" in said
    assert "memory  rank 1-2 (trainer, generator): " in said
    assert "fits" not in said, "no rank is on a GPU"
    assert main(words(model, "generator.max_num_seqs=4")) == ExitCode.BAD_INPUT
    assert f"model.path: no weights in {model}" in capsys.readouterr().err


def test_a_model_that_cannot_be_built_is_reported_in_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_config(tmp_path / "model", "Qwen2.5-0.5B", model_type="olmo", hidden_act="no_such")
    assert main([*words(model, "generator.engine=vllm"), "dry_run=true"]) == ExitCode.DONE
    assert "memory  cannot be planned: transformers cannot build a model of this config.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("limit", "cost"),
    [
        ("60", "at most 4 node-hours, 4 GPU-hours (1 h 00 min a job)"),
        ("7", "at most 0.4667 node-hours, 0.4667 GPU-hours (7 min 00 s a job)"),
        ("0:45", "at most 0.05 node-hours, 0.05 GPU-hours (45 s a job)"),
        ("20833-8", "at most 2,000,000 node-hours, 2,000,000 GPU-hours (500000 h 00 min a job)"),
    ],
)
def test_the_cost_of_a_short_and_of_a_large_job(limit: str, cost: str) -> None:
    component = "cluster.components={node: {roles: [controller, trainer], ranks_per_node: 1, gpus_per_node: 1}}"
    words = ["layout.trainer.num_ranks=4", component, f"cluster.time='{limit}'", "cluster.signal_lead_s=1"]
    config = load(["+cluster=slurm", *words])
    assert list(node_rows(config, RoleLayout.from_config(config)))[-1] == ("cost", cost)


GPU_NODE = "cluster.components={node: {roles: [controller, trainer], ranks_per_node: 2, gpus_per_node: 2%s}}"


@pytest.mark.parametrize(("memory", "enough"), [("5G", False), ("11264", True), ("", None)])
def test_host_memory_of_all_ranks_of_a_node_is_added_up(
    memory: str, enough: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen2.5-0.5B in fp32 on two ranks: each has its half of a snapshot (2.76 GiB) and the program (.54), all that
    controller and reward have."""
    model = write_config(tmp_path / "model", "Qwen2.5-0.5B")
    given = GPU_NODE % (f", memory: {memory}" if memory else "")
    assert main([*words(model, given, "generator.max_num_seqs=4"), "dry_run=true"]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert "in host memory 3.3 GiB at most" in said
    ((both, compared),) = re.findall(r"all ranks of a node of node together: (.+) of host memory at most(.*)", said)
    assert both == "7.15 GiB"
    asked = {"5G": "5 GiB", "11264": "11 GiB", "": ""}[memory]
    ending = {True: f"; its memory key requests {asked}", None: ""}
    assert compared == ending.get(enough, f"; its memory key requests {asked}, which is not enough")
    assert "node: controller, trainer, generator, reward; 1 node(s) with 2 GPU(s)" in said
    assert "note: nodes and cost are for a Slurm job" in said, "the words have no +cluster=slurm"


def test_missing_data_of_a_recipe_is_noted_and_of_a_user_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = ["+cluster=slurm", "+experiment=rlvr_vl_7b"]
    assert main([*recipe, "dry_run=true"]) == ExitCode.DONE
    said = capsys.readouterr().out
    missing = "does not exist; its rows are not checked, and the run cannot start without it"
    assert f"note: data/geoqa_r1v_train_8k.parquet {missing}" in said
    assert "(qwen2_5_vl, 8.29B parameters), trained in bfloat16, kept in float32, generated in bfloat16\n" in said
    for words in ([*recipe, "data.train=mine.parquet", "dry_run=true"], recipe):
        assert main(words) == ExitCode.BAD_INPUT
        assert ".parquet: no such file" in capsys.readouterr().err


@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_a_run_folder_that_nodes_may_not_share_is_noted(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = f"+cluster={cluster} data.train=task:sort_digits reward.default.name=sort_digits dry_run=true".split()
    for folder, noted in (("/tmp/hpcrl_run", cluster == "slurm"), ("/scratch/hpcrl_run", False)):
        assert main([*there, f"run_dir={folder}"]) == ExitCode.DONE
        assert ("note: on most clusters /tmp is local to each machine" in capsys.readouterr().out) is noted


def test_too_little_disk_space_for_a_checkpoint_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_config(tmp_path / "model", "Qwen2.5-0.5B")
    free = os.statvfs_result((4096, 4096, 1 << 30, 1 << 20, 1 << 20, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: free)  # 4 GiB; three checkpoints take 16.6
    assert main([*words(model, "generator.max_num_seqs=4"), "dry_run=true"]) == ExitCode.DONE
    assert "the file system of the run folder has 4 GiB free, which is not enough" in capsys.readouterr().out


def test_byte_counts_are_formatted_readably() -> None:
    assert [size(n) for n in (512, 3 << 20, 5 << 30, 3 << 40)] == ["0.5 KiB", "3 MiB", "5 GiB", "3 TiB"]


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ("0.19.4", ["deepspeed 0.19.4"]),
        ("0.20.0", ["deepspeed 0.20.0", "note: deepspeed 0.20.0 is installed, but hpcrl is written for 0.19*"]),
        ("", ["deepspeed (not installed here)"]),
    ],
)
def test_the_plan_names_the_versions_of_engines(
    installed: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "version_of", lambda module: installed)
    assert [text for _, text in plan._engines(load(["trainer.engine=deepspeed"]))] == said
    assert list(plan._engines(load([]))) == []


def test_the_plan_notes_how_an_engine_differs() -> None:
    both = ["rollout.top_p=.9", "rollout.top_k=100"]
    text = "SGLang takes rollout.top_p=0.9 of all tokens, other engines of those that rollout.top_k=100 keeps"
    found = [list(plan._engines(load([*both[:count], "generator.engine=sglang"])))[1:] for count in (1, 2)]
    assert found == [[], [("", f"note: {text}")]]
    assert list(plan._engines(load(both))) == []
