"""What a preemption costs on a real Slurm: a run of 3 ranks, a job of a higher partition that takes its node.

One JSON line, in seconds. Of hpcrl: from the signal to its last process gone, less the step that was running; from the
start of its processes to the first step trained. Of Slurm: from the last process gone to the batch script's next start
(requeue and scheduling, with other nodes free). Also from submission to the first step, against a job whose bare torch
script loads the same model and trains one step. Run it on an idle machine; needs slurmctld and runs/demo_sft/hf.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hpcrl.metrics.log import read_metrics
from hpcrl.system.files import committed_step
from tests.bench.machine import tell
from tests.conftest import ROOT
from tests.slurm.conftest import load_one_machine
from tests.slurm.jobs import PENDING, RUNNING, processes, show, step_of, submit, wait_state, wait_step, wait_until

MODEL = ROOT / "runs" / "demo_sft" / "hf"
WORDS = ["+experiment=demo", f"model.path={MODEL}", "max_steps=1000", "eval_every=0", "cluster.time=00:30:00"]
BARE = """#!{python}
import sys, time, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({model!r})
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, 100, (32, 64))
model(tokens, labels=tokens).loss.backward()
optimizer.step()
open({done!r}, "w").write(str(time.time()))
"""


def started(cluster: Any, job: int) -> float:
    """When the oldest process of the job's step began: the agent."""
    found = [p.create_time() for p in processes(cluster, job) if "hpcrl.run" in " ".join(p.cmdline())]
    return min(found)


def first_step(run_dir: Path, before: int) -> float:
    """When the run had logged the step after `before`."""
    wait_until(lambda: step_of(run_dir) > before, lambda: "no step", 120)
    return (run_dir / "metrics.jsonl").stat().st_mtime


def gone(cluster: Any, job: int) -> float:
    wait_until(lambda: not processes(cluster, job), lambda: "processes are left", 120)
    return time.time()


def bare(cluster: Any, folder: Path) -> float:
    """Seconds from the submission of a bare torch script to its first step."""
    done, script = folder / "done", folder / "bare.py"
    script.write_text(BARE.format(python=sys.executable, model=str(MODEL), done=str(done)))
    begun = time.time()
    cluster.run("sbatch", "--cpus-per-task=3", f"--output={folder}/bare.log", str(script))
    wait_until(lambda: done.exists() and done.read_text() != "", (folder / "bare.log").read_text)
    return float(done.read_text()) - begun


def main() -> None:
    """Print the JSON line."""
    one_machine = load_one_machine()
    with tempfile.TemporaryDirectory() as name, one_machine.Cluster(Path(name) / "s", [one_machine.Nodes("n", 2)]) as c:
        folder = Path(name)
        plain_s = bare(c, folder)
        run_dir, begun = folder / "run", time.time()
        job = submit(c, run_dir, *WORDS)
        submitted_s = time.time() - begun
        first = first_step(run_dir, 0)
        start_s = first - started(c, job)
        wait_step(c, run_dir, job, 20)
        step_s = sum(row["time/step_total"] for row in read_metrics(run_dir)[-10:]) / 10
        node = show(c, job)["NodeList"]
        asked = time.time()
        c.run("sbatch", "--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
        wait_until(lambda: (run_dir / "slurm" / f"job-{job}.log").read_text().count("stopped by") > 0, lambda: "", 60)
        stopped = time.time()
        before, ended = step_of(run_dir), gone(c, job)
        lost = before - committed_step(run_dir)
        wait_state(c, run_dir, job, [PENDING, RUNNING])
        restarted = first_step(run_dir, before)
        began = started(c, job)
        result = {
            "bench": "preemption",
            "step_s": round(step_s, 2),
            "asked_to_stopped_s": round(stopped - asked, 2),
            "stopped_to_gone_s": round(ended - stopped, 2),
            "gone_to_processes_s_slurm": round(began - ended, 2),
            "processes_to_step_s": {"first": round(start_s, 2), "resumed": round(restarted - began, 2)},
            "total_s": round(restarted - asked, 2),
            "submission_s": round(submitted_s, 2),
            "submission_to_first_step_s": {"hpcrl": round(first - begun, 2), "bare_torch": round(plain_s, 2)},
            "steps_lost": lost,
        }
        c.run("scancel", str(job))
        gone(c, job)
        tell(result)


if __name__ == "__main__":
    main()
