"""Run folders written by hand, in the form of a run with several attempts."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.config_file import write_config

BEGAN = datetime(2026, 11, 28, 19, 0, tzinfo=UTC).timestamp()
JOB = 50
METRICS_OF_A_STEP = 100


def at(seconds: float, form: str = "milliseconds") -> str:
    """A time so many seconds after the run began, as logs and records have it."""
    return datetime.fromtimestamp(BEGAN + seconds, UTC).isoformat(timespec=form)


def row(step: int) -> dict[str, Any]:
    """A step's metrics: some that rules read, unremarkable, and others up to METRICS_OF_A_STEP."""
    wave = math.sin(step / 7)
    known = {
        "step": step,
        "critic/rewards/mean": 0.5 + 0.1 * wave,
        "critic/advantages/min": -2.0,
        "critic/advantages/max": 2.0,
        "critic/entropy/mean": 0.6 + 0.05 * wave,
        "token/response_length/mean": 400 + 30 * wave,
        "token/response_length/clip_ratio": 0.05,
        "mismatch/kl_k3": 1e-4,
        "scheduler/staleness/mean": 0.0,
        "time/step_generate": 6.0,
        "time/step_reward_wait": 1.0,
        "time/step_rollout_transfer": 0.5,
        "time/step_train": 3.0,
        "time/step_update_weights": 0.25,
        "time/step_total": 10.0,
    }
    if step % 10 == 0:
        known |= {"val/score/mean": 0.4 + step / 2000, "time/val_step": 2.0}
    return known | {f"other/metric_{n:03d}": wave * n for n in range(METRICS_OF_A_STEP - len(known))}


def write_rows(path: Path, steps: range) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row(step)) + "\n" for step in steps))


def log(who: str, lines: list[tuple[float, str]]) -> str:
    return "".join(f"{at(seconds)} n1 {who} INFO {text}\n" for seconds, text in lines)


def write_run(folder: Path, steps: int = 30, **config: Any) -> Path:
    """A finished run in a Slurm job of two nodes with four GPUs, in three attempts: the first was preempted after step
    10 with a checkpoint, the second was lost after step 15 with a checkpoint of step 12, the third finished."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "run_name": folder.name,
        "max_steps": steps,
        "cluster": {"name": "slurm", "components": {"all": {"ranks_per_node": 4, "gpus_per_node": 4}}},
        "layout": {"trainer": {"num_ranks": 7}, "generator": {"num_ranks": None, "colocate_with": "trainer"}},
    }
    parsed = Config.model_validate(values | config).model_dump(mode="json")
    (folder / "config.yaml").write_bytes(write_config(parsed, ["algorithm=dapo", "+experiment=made"]))
    write_rows(folder / "metrics.jsonl", range(steps + 1))
    write_rows(folder / "abandoned" / "3" / "metrics.jsonl", range(13, 16))
    facts = [
        {
            "attempt": number,
            "kind": "fresh" if number == 1 else "resume",
            "changes": ["save_every: 5 -> 6"] if number == 2 else [],
            "start": at(began, "seconds"),
            "host": "n1" if number < 3 else "n3",
            "versions": {"hpcrl": "0.6.0", "torch": "2.12.0" if number < 3 else "2.13.0"},
            "git_commit": "a" * 40,
        }
        for number, began in ((1, 0), (2, 300), (3, 600))
    ]
    (folder / "facts.json").write_text(json.dumps({"attempts": facts}))
    closed = {"how": "requeue", "goes_on": True, "why": "resumes from its checkpoint in the next job"}
    owners = [
        {"since": at(0, "seconds"), "job": JOB, "restarts": 0, "host": "n1", "ended": at(150, "seconds"), **closed},
        {"since": at(300, "seconds"), "job": JOB, "restarts": 1, "host": "n1"},
        {"since": at(600, "seconds"), "job": JOB, "restarts": 2, "host": "n3", "ended": at(9000, "seconds")},
    ]
    for number, owner in enumerate(owners, 1):
        path = folder / "owners" / f"{number:04d}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(owner))
    firsts, lasts, resumed = (1, 11, 13), (10, 15, steps), (0, 10, 12)
    for place, began in enumerate((0, 300, 600)):
        logs = folder / "logs" / f"attempt_{place + 1:04d}"
        logs.mkdir(parents=True, exist_ok=True)
        said = [(began + 20.0, "process 7 is rank 0: controller")]
        said += (
            [(began + 30.0, f"resumed from step_{resumed[place]:06d}")]
            if place
            else [(began + 30.0, f"step 0/{steps}")]
        )
        said += [
            (began + 40.0 + 10.0 * n, f"step {step}/{steps}  reward 0.5")
            for n, step in enumerate(range(firsts[place], lasts[place] + 1))
        ]
        (logs / "rank_0000.log").write_text(log("rank 0", said))
    (folder / "logs" / "attempt_0001" / "agent_0000.log").write_text(
        log("agent", [(140.0, "stopped by SIGUSR1 after step 10, everything is saved")])
    )
    (folder / "slurm").mkdir(exist_ok=True)
    (folder / "slurm" / f"job-{JOB}.log").write_text(
        log("launch", [(1.0, f"attempt 1 in job {JOB}, restart 0")])
        + "slurmstepd: error: *** JOB 50 ON n1 CANCELLED AT 2026-11-28T19:02:29 DUE TO PREEMPTION ***\n"
        + log("launch", [(301.0, f"attempt 2 in job {JOB}, restart 1"), (601.0, f"attempt 3 in job {JOB}, restart 2")])
    )
    done = {"step": steps, "max_steps": steps, "reason": f"trained {steps} steps", "at": at(9000, "seconds")}
    (folder / "finished.json").write_text(json.dumps(done))
    return folder
