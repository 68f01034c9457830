"""How long a run waits for a rank that somebody has stopped (SIGSTOP), with the timeouts of a real run.

    python -m tests.bench.stopped [ROLE ...]

One JSON line for each role, whose ranks do nothing else: the seconds from the signal until the run has trained another
step without the rank (`goes on`) or its launcher has ended, so that a job would be requeued (the exit code's name).
Needs runs/demo_sft/hf, which the first half of `make demo` makes.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import load
from hpcrl.system.exit_codes import ExitCode
from tests.bench.machine import tell
from tests.conftest import ROOT
from tests.e2e.program import Start

WORDS = f"""
+experiment=demo model.path={ROOT}/runs/demo_sft/hf layout=disaggregated max_steps=10000 eval_every=0
rollout.num_prompts=4 rollout.group_size=4 algorithm.kl_loss_coef=.01
""".split()
ENV = ["env=scripted", "env.default.name=class", "env.default.class_path=tests.e2e.user_code:RoughEnv"]
ROLES = {
    "controller": [],
    "trainer": [],
    "generator": [],
    "reference": [],
    "reward": ["layout.reward.num_ranks=2"],
    "env": ["layout.env.num_ranks=2", *ENV],
}


def measure(role: str, folder: Path) -> None:
    """Print the JSON line of a role."""
    words = [*WORDS, *ROLES[role]]
    config = load(words)
    rank = RoleLayout.from_config(config).ranks[role][-1]
    start = Start(folder / role, words, {"PYTHONPATH": str(ROOT)})
    start.wait_until(lambda: start.step >= 4, 300)
    began, before = time.monotonic(), start.step
    os.kill(start.ranks[rank], signal.SIGSTOP)
    start.wait_until(lambda: "continues without it" in start.text, 1200)
    start.wait_until(lambda: start.step > before + 1, 1200)
    waited_s, code = time.monotonic() - began, start.process.poll()
    end = "goes on" if code is None else ExitCode(code).name
    start.kill()
    timeouts = {"store_s": config.timeouts.store_s, "command_s": config.timeouts.command_s}
    tell({"bench": "stopped", "role": role, "rank": rank, "waited_s": round(waited_s, 1), "end": end, **timeouts})


def main() -> None:
    """Print a JSON line for each role."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roles", nargs="*", choices=[[], *ROLES], help="those to stop, by default all in turn")
    roles = parser.parse_args().roles or ROLES
    with tempfile.TemporaryDirectory() as name:
        for role in roles:
            measure(role, Path(name))


if __name__ == "__main__":
    main()
