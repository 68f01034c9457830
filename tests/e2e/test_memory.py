"""Peak memory of a whole run in one process, phase by phase, against the plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import parse
from hpcrl.metrics.log import read_metrics
from hpcrl.models.families import read_shape
from hpcrl.planner.memory import PROGRAM_BYTES, memory
from hpcrl.planner.memory_parts import Phase
from tests.e2e.program import Start

WORDS = [
    *("pipeline=rlvr", "algorithm=grpo", "layout=single", "data.train=task:sort_digits", "data.max_prompt_tokens=24"),
    *("rollout.num_prompts=4", "rollout.group_size=4", "rollout.max_new_tokens=100", "generator.max_num_seqs=16"),
    *("reward.default.name=exact_match", "rollout.filter_std=false", "max_steps=2", "eval_every=0", "save_every=0"),
    *("model.tiny.vocab_size=12000", "model.tiny.hidden_size=512", "model.tiny.intermediate_size=1536"),
    *("model.tiny.num_layers=3", "trainer.lr=1e-5"),
]


@pytest.mark.slow
def test_offloading_changes_no_result(tmp_path: Path) -> None:
    rows = {}
    small = ["model.tiny.vocab_size=320", "model.tiny.hidden_size=64", "trainer.lr=1e-3", "rollout.max_new_tokens=12"]
    for mode in ("never", "always"):
        words = [*WORDS, *small, "deterministic=true", f"layout.offload={mode}"]
        start = Start(tmp_path / mode, words)
        assert start.wait() == 0, start.text
        rows[mode] = [
            {name: value for name, value in row.items() if not name.startswith(("time/", "system/", "scheduler/"))}
            for row in read_metrics(tmp_path / mode)
        ]
    assert rows["never"] == rows["always"] and len(rows["never"]) == 3


@pytest.mark.slow
def test_memory_peaks_of_one_process_are_within_a_tenth_of_the_plan(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    start = Start(run_dir, [*WORDS, f"run_dir={run_dir}"])
    assert start.wait() == 0, start.text
    config = parse(yaml.safe_load((run_dir / "config.yaml").read_text()))
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": "cpu"})})
    shape = read_shape(config.model.tiny.hf_config())
    [rank] = memory(config, RoleLayout.from_config(config), shape)
    assert rank.peak(on_host=True)[0] == "train"
    last = read_metrics(run_dir)[-1]
    twice = dataclasses.replace(
        rank, parts=tuple(dataclasses.replace(p, num_bytes=2 * p.num_bytes) for p in rank.parts)
    )
    phases: tuple[Phase, ...] = ("train", "generate", "publish")
    for phase in phases:
        peak = last[f"system/{phase}/peak_gib"]
        assert peak is not None
        planned = rank.total(phase, on_host=True) / 2**30
        assert peak <= planned <= 1.1 * peak, phase
        # Negative control: the program is not most of it.
        assert twice.total(phase, on_host=True) / 2**30 - PROGRAM_BYTES / 2**30 > 1.25 * peak
