"""Hours and energy of runs: Slurm's accounting through a stand-in for sacct, records without it, and what was lost."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hpcrl.cluster.accounting import AccountedStart, Accounting, accounted_starts, read_starts
from hpcrl.cluster.slurm import Job, SlurmSilent
from hpcrl.commands import cost, report, status
from hpcrl.report.hours_text import energy_in_words, in_short, lost_in_words
from hpcrl.report.run_files import RunFiles
from hpcrl.report.run_hours import SpentHours, accounting_of, run_hours
from hpcrl.system.exit_codes import ExitCode
from tests.report.synthetic import BEGAN, JOB, at, write_rows, write_run
from tests.report.test_page import blocks

FINISHED = "finished: trained 30 steps"
MORE = "billing=1,energy=3,mem=4G"


def seconds(value: float | None) -> str:
    return "Unknown" if value is None else f"{BEGAN + value:.0f}"


def record(name: str, raw: str, begin: float, end: float | None, lasted: int, tres: str, joules: str = "") -> str:
    state = "RUNNING" if end is None else "CANCELLED by 1000"
    return "|".join((name, raw, state, seconds(begin), seconds(end), str(lasted), tres, joules))


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, *lines: str, body: str = "") -> None:
    """A sacct that prints these lines, and records the arguments with which it was called."""
    folder.mkdir(exist_ok=True)
    (folder / "said.txt").write_text("\n".join(lines) + "\n")
    text = f'#!/bin/sh\necho "$@" >> {folder}/called.txt\n{body}\ncat {folder}/said.txt\n'
    (folder / "sacct").write_text(text)
    (folder / "sacct").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


GPU_NODES, CPU_NODE = f"cpu=8,gres/gpu=8,gres/gpu:a100=8,node=2,{MORE}", f"cpu=4,node=1,{MORE}"
HETJOB = (
    # The batch step runs beside the others; the two steps of srun run one after the other: 0.4 + 3.2 MJ are 1 kWh.
    record("50+0", "50", -60, 240, 300, GPU_NODES, "9999999"),
    record("50+0.batch", "50.batch", -60, 240, 300, "", "1800000"),
    record("50+0.0", "50.0", -50, -20, 30, "", "400000"),
    record("50+0.1", "50.1", -10, 230, 240, "", "3200000"),
    record("50+1", "51", -60, 240, 300, CPU_NODE),
    record("50+1.1", "51.1", -10, 230, 240, "", "360000"),
    record("50+0", "50", 280, 400, 120, GPU_NODES, "0"),
    record("50+0.0", "50.0", 290, 400, 110, "", "0"),
    record("50+1", "51", 280, 400, 120, CPU_NODE),
    record("50+1.0", "51.0", 290, 400, 110, "", "18446744073709551614"),
    record("50+0", "50", 500, 560, 60, GPU_NODES),  # it began no attempt
    record("50+1", "51", 500, 560, 60, CPU_NODE),
    record("50+0", "50", 590, 9050, 8400, GPU_NODES),  # 60 s of it suspended
    record("50+0.0", "50.0", 595, 9040, 8385, "", "7200000"),
    record("50+1", "51", 590, 9050, 8400, CPU_NODE),
    record("50+0", "50", 9100, None, 0, ""),  # requeued, has no nodes yet
    "no record|of this form",
)


def test_a_hetjob_with_requeues_in_slurms_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes with 8 GPUs and 12 CPUs for 300 + 120 + 60 + 8400 = 8880 s: 7.4 node-hours, 19.73 GPU-hours, 29.6
    core-hours; 1 + .1 + 2 kWh of 2 x 300 + 300 + 2 x 8400 node-seconds."""
    stand_in(monkeypatch, tmp_path / "bin", *HETJOB)
    run = RunFiles(write_run(tmp_path / "run"), FINISHED)
    run.accounting = accounting_of(run)
    assert "-D -j 50 -o JobID" in (tmp_path / "bin" / "called.txt").read_text()
    hours = run_hours(run)
    assert hours.total.values == pytest.approx((7.4, 8 * 8880 / 3600, 29.6))
    assert (hours.kwh, hours.kwh_node) == pytest.approx((3.1, 17700 / 3600))
    found = [(each.number, each.restarts, each.seconds, each.spent.node, each.kwh) for each in hours.attempts]
    assert found == [
        (1, 0, 300.0, pytest.approx(0.25), pytest.approx(1.1)),
        (2, 1, 120.0, pytest.approx(0.1), None),
        (3, 2, 8400.0, pytest.approx(7.0), None),
    ]
    assert all(each.accounted for each in hours.attempts) and hours.notes == []
    assert [(job.job, job.starts, job.idle_starts) for job in hours.jobs] == [(50, 4, 1)]
    assert hours.jobs[0].spent == hours.total and hours.jobs[0].kwh == pytest.approx(3.1)
    # Three steps of 10 s, of the 120 s of attempt 2.
    assert (hours.lost.steps, hours.lost.seconds) == (3, 30.0)
    assert hours.lost.spent.values == pytest.approx((0.025, 0.2 / 3, 0.1))
    assert energy_in_words(hours) == "3.1 kWh in Slurm's accounting (1 job(s)), of 4.92 of the 7.4 node-hours"
    assert in_short(hours) == (
        "7.4 node-hours, 19.7 GPU-hours, 29.6 core-hours; 3.1 kWh in Slurm's accounting (1 job(s)), of 4.92 of the 7.4 "
        "node-hours; 3 step(s) of 0.025 node-hours, 0.0667 GPU-hours computed and lost"
    )


def test_energy_of_steps_beside_each_other_counts_once() -> None:
    steps = [(0, 10, "5"), (0, 4, "3"), (5, 10, "3"), (0, 10, "4")]
    lines = [record("7", "7", 0, 10, 10, "cpu=1,node=1", "100")]
    lines += [record(f"7.{n}", f"7.{n}", begin, end, 1, "", joules) for n, (begin, end, joules) in enumerate(steps)]
    assert read_starts("\n".join(lines))[0].joules == 6.0  # 3 + 3 one after the other
    assert read_starts("\n".join(lines[:2]))[0].joules == 5.0
    assert read_starts(lines[0])[0].joules == 100.0  # steps are not accounted
    for nothing in ("", "0", "4294967294", "18446744073709551614", "-"):
        assert read_starts(record("7", "7", 0, 10, 10, "cpu=1,node=1", nothing))[0].joules is None


def test_records_of_arrays_of_gpus_by_type_and_damaged_ones() -> None:
    typed = record("60_3", "63", 0, 10, 10, "cpu=4,gres/gpu:a100=2,gres/gpu:h100=1,node=1,mem=2G")
    assert read_starts(typed)[0] == AccountedStart(63, 0, "CANCELLED", BEGAN, BEGAN + 10, 10, 1, 4, 3, None)
    pending = "64|64|PENDING|Unknown|Unknown|0||"
    orphan = record("65.0", "65.0", 0, 1, 1, "")
    assert read_starts("\n".join((orphan, pending, "", "a|b", typed.replace("63|", "x|")))) == []


def test_without_accounting_the_times_of_attempts_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts of 150 s, of 80 s (its last message; it left no record of its end), and of 8400 s, on two nodes with
    four GPUs each; five ranks with one CPU are the most of a node."""
    monkeypatch.setenv("PATH", str(tmp_path))
    run = RunFiles(write_run(tmp_path / "run"), FINISHED)
    run.accounting = accounting_of(run)
    hours = run_hours(run)
    assert [each.seconds for each in hours.attempts] == [150.0, 80.0, 8400.0]
    assert hours.total.node == pytest.approx(2 * 8630 / 3600) and hours.total.gpu == pytest.approx(8 * 8630 / 3600)
    assert hours.jobs == [] and hours.kwh is None and energy_in_words(hours) == ""
    assert hours.notes == [
        "no accounting: sacct is not installed on this machine; run this where Slurm's commands are available: times "
        "are those between the begin and the end of attempts"
    ]


def test_a_slow_sacct_ends_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path / "bin", *HETJOB, body="exec sleep 60")
    with pytest.raises(SlurmSilent, match=r"sacct gave no answer within 0\.2 s"):
        accounted_starts([50], timeout_s=0.2)
    run = RunFiles(write_run(tmp_path / "run"), FINISHED)
    run.accounting = accounting_of(run, timeout_s=0.2)
    assert run.accounting == Accounting((), "no accounting: sacct gave no answer within 0.2 s")
    assert [each.seconds for each in run_hours(run).attempts] == [150.0, 80.0, 8400.0]


def test_nonsense_of_sacct_is_told_and_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no record is left out; a sacct that cannot be started is named."""
    nines = "9" * 400
    for name, raw, tres in (("50", "50", f"cpu={nines},node={nines}"), ("\u00b2", "\u00b2", "cpu=1,node=1")):
        assert read_starts(record(name, raw, 0, 10, 10, tres)) == []
    stand_in(monkeypatch, tmp_path / "bin", body="printf '\\377\\376|x\\n'")
    run = RunFiles(write_run(tmp_path / "run"), FINISHED)
    assert accounting_of(run) == Accounting((), "Slurm's accounting has no such job")
    (tmp_path / "bin" / "sacct").chmod(0o644)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert accounting_of(run) == Accounting((), "no accounting: sacct cannot be started: Permission denied")


def test_what_the_preflight_saw_comes_before_the_configuration(tmp_path: Path) -> None:
    """Attempt 1 had three nodes, one without GPUs; the site accounts no GPUs, so they come from the preflight."""
    folder = write_run(tmp_path / "run")
    meeting = folder / "world" / "attempt_0001" / "preflight" / "50.0.0"
    meeting.mkdir(parents=True)
    for node, gpus in enumerate((4, 4, 0)):
        (meeting / f"node_{node:04d}.json").write_text(json.dumps({"node": node, "gpus": gpus, "cpus": 16}))
    (meeting / "verdict.json").write_text("{}")
    run = RunFiles(folder, FINISHED)
    first, second, _ = run_hours(run).attempts
    assert first.spent.values == pytest.approx((3 * 150 / 3600, 8 * 150 / 3600, 48 * 150 / 3600))
    assert second.spent.node == pytest.approx(2 * 80 / 3600)
    run.accounting = Accounting((AccountedStart(50, 0, "PREEMPTED", BEGAN - 30, BEGAN + 150, 180, 3, 96, None, None),))
    first = run_hours(run).attempts[0]
    assert first.spent.values == pytest.approx((3 * 180 / 3600, 8 * 180 / 3600, 96 * 180 / 3600))


def test_an_allocation_of_another_purpose_counts_only_while_attempts_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, tmp_path / "bin", *HETJOB)
    folder = write_run(tmp_path / "run")
    (folder / "slurm" / f"job-{JOB}.log").unlink()  # hpcrl did not submit the job
    assert accounting_of(RunFiles(folder)).starts  # but the run is all that the job does
    (tmp_path / "bin" / "called.txt").unlink()
    for path in (folder / "owners").iterdir():  # each attempt is one command among others
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": 7, "process_start": 1.0}))
    run = RunFiles(folder, FINISHED)
    run.accounting = accounting_of(run)
    assert not (tmp_path / "bin" / "called.txt").exists()
    assert run_hours(run).total.node == pytest.approx(2 * 8630 / 3600)


def test_a_record_that_was_never_closed_and_one_of_an_older_job(tmp_path: Path) -> None:
    """Slurm lost the end of the third start, and has 1e6 s of it; job 50 of two months before is another one."""
    whole = (2, 8, 8, None)
    starts = (
        AccountedStart(50, 0, "COMPLETED", BEGAN - 6e6, BEGAN - 5.9e6, 1e5, *whole),
        AccountedStart(50, 0, "PREEMPTED", BEGAN - 10, BEGAN + 150, 160, *whole),
        AccountedStart(50, 0, "RUNNING", BEGAN + 590, None, 1e6, *whole),
    )
    run = RunFiles(write_run(tmp_path / "run"), FINISHED)
    run.accounting = Accounting(starts)
    hours = run_hours(run, now=BEGAN + 1e6)
    assert [each.seconds for each in hours.attempts] == [160.0, 80.0, 8410.0]
    assert [each.accounted for each in hours.attempts] == [True, False, True]
    assert hours.total.node == pytest.approx(2 * (160 + 80 + 8410) / 3600)
    assert hours.notes == ["attempts 2 are not in Slurm's accounting: from their begin to their end"]


def test_several_attempts_in_one_start_share_its_time(tmp_path: Path) -> None:
    run = RunFiles(write_run(tmp_path / "run"), FINISHED)
    run.accounting = Accounting((AccountedStart(50, 0, "COMPLETED", BEGAN, BEGAN + 9000, 9000, 2, 8, 8, 7.2e6),))
    hours = run_hours(run)
    assert [each.seconds for each in hours.attempts] == [300.0, 300.0, 8400.0]
    assert hours.total.node == pytest.approx(5.0) == sum(each.spent.node or 0 for each in hours.attempts)
    assert hours.kwh == pytest.approx(2.0) and all(each.kwh is None for each in hours.attempts)


def alive(folder: Path) -> Path:
    """The same run in its third attempt, after step 30, with a checkpoint of step 28."""
    (folder / "finished.json").unlink()
    (folder / "checkpoints" / "step_000028").mkdir(parents=True)
    (folder / "owners" / "0003").write_text(json.dumps({"since": at(600, "seconds"), "job": JOB, "restarts": 2}))
    return folder


def test_a_living_run_counts_until_now_and_names_what_is_not_saved(tmp_path: Path) -> None:
    """Steps 29 and 30 take 10 and 12 s with the validation; the attempt has had two nodes for 3600 s."""
    folder = alive(write_run(tmp_path / "run"))
    hours = run_hours(RunFiles(folder, "running: job 50, attempt 3"), now=BEGAN + 4200)
    assert hours.attempts[-1].runs and hours.attempts[-1].spent.node == pytest.approx(2.0)
    assert (hours.unsaved.steps, hours.unsaved.seconds, hours.lost.steps) == (2, 22.0, 3)
    assert hours.unsaved.spent.node == pytest.approx(2 * 22 / 3600)
    assert lost_in_words(hours).endswith("; 2 step(s) of 0.0122 node-hours, 0.0489 GPU-hours not in a checkpoint yet")
    # Killed, and waiting for its next start: the two steps are lost as well. The last message was at 600 + 40 + 170 s.
    hours = run_hours(RunFiles(folder, "requeued: job 50 waits"), now=BEGAN + 99999)
    assert hours.attempts[-1].seconds == 210.0 and hours.all_lost.steps == 5
    assert "5 step(s)" in lost_in_words(hours) and "checkpoint" not in lost_in_words(hours)
    # The next start has no attempt yet: the third one does not hold its nodes.
    hours = run_hours(RunFiles(folder, "starting: job 50 is running"), now=BEGAN + 99999)
    assert hours.attempts[-1].seconds == 210.0 and hours.all_lost.steps == 5
    # Slurm does not answer: nothing is claimed of them.
    hours = run_hours(RunFiles(folder, "unknown: job 50: no answer"), now=BEGAN + 99999)
    assert hours.attempts[-1].seconds == 210.0 and (hours.all_lost.steps, hours.unsaved.steps) == (3, 2)


def test_steps_left_for_a_branch_are_not_lost(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    facts = json.loads((folder / "facts.json").read_text())
    facts["attempts"][2]["branch"] = {"from": 12, "changes": [], "reason": ""}
    (folder / "facts.json").write_text(json.dumps(facts))
    hours = run_hours(RunFiles(folder, FINISHED))
    assert (hours.lost.steps, hours.left.steps) == (0, 3)


def test_a_run_on_this_machine(tmp_path: Path) -> None:
    """Two hours on 6 CPUs, without a GPU; device=auto may have had one, which nothing records."""
    facts = {"attempt": 1, "start": at(0, "seconds"), "num_cpus": 6}
    ended = {"since": at(0, "seconds"), "pid": 7, "host": "n1", "process_start": 1.0, "ended": at(7200, "seconds")}
    for device, gpu, told in (("cpu", 0.0, []), ("auto", None, ["attempts 1: how many GPUs they had is unknown"])):
        folder = write_run(tmp_path / device, cluster={"name": "local", "device": device})
        for name in ("0002", "0003"):
            (folder / "owners" / name).unlink()
        (folder / "facts.json").write_text(json.dumps({"attempts": [facts]}))
        (folder / "owners" / "0001").write_text(json.dumps(ended))
        (folder / "slurm" / f"job-{JOB}.log").unlink()
        run = RunFiles(folder, FINISHED, accounting_of(RunFiles(folder)))
        hours = run_hours(run)
        assert hours.total == SpentHours(2.0, gpu, 12.0) and hours.notes == told
        assert in_short(hours) == "2 node-hours, 12 core-hours"


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "config.yaml").write_text("a: [1\nb: {")
    (folder / "owners" / "0001").write_text("")
    (folder / "owners" / "0002").write_text('{"since": 7, "job": [1], "cluster": {}, "ended": "never"}')
    (folder / "facts.json").write_text('{"attempts": [{"attempt": 1, "start": "soon", "num_cpus": -3}]}')
    (folder / "slurm" / "submitted.json").write_text('{"jobs": ["50", -1, null], "cluster": 3}')
    (folder / "abandoned" / "3" / "metrics.jsonl").write_text(
        '{"step": 13, "time/step_total": "x"}\n{"step": "a"}\n[]\n'
        '{"step": 14, "time/step_total": 1e999, "time/val_step": -5}\n'
    )
    for path in (folder / "logs").rglob("*.log"):
        path.write_bytes(b"\xff\x00\n")
    run = RunFiles(folder, FINISHED)
    accounting_of(run, timeout_s=0.2)
    hours = run_hours(run)
    assert [each.seconds for each in hours.attempts] == [None, None, 8400.0]
    assert hours.total == SpentHours() and (hours.lost.steps, hours.lost.seconds) == (2, 0.0)
    assert hours.notes[0] == "attempts 1, 2 are not counted: when they began or ended is unknown"
    assert any("config.yaml" in problem for problem in run.problems)


def test_hundreds_of_requeues(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for number in range(1, 401):
        owner = {"since": at(100 * number, "seconds"), "job": JOB, "restarts": number - 1}
        owner["ended"] = at(100 * number + 90, "seconds")
        (folder / "owners" / f"{number:04d}").write_text(json.dumps(owner))
    whole = (1, 4, 4, 3.6e6)
    starts = [
        AccountedStart(50, 0, "PREEMPTED", BEGAN + 100 * n - 2, BEGAN + 100 * n + 90, 92, *whole) for n in range(1, 401)
    ]
    run = RunFiles(folder, FINISHED, Accounting(tuple(starts)))
    began = time.process_time()
    hours = run_hours(run)
    assert time.process_time() - began < 5
    assert hours.total.node == pytest.approx(400 * 92 / 3600) and hours.kwh == pytest.approx(400)
    assert [each.kwh for each in hours.attempts] == pytest.approx([1.0] * 400)


def test_the_command_and_status_show_the_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, tmp_path / "bin", *HETJOB)
    folder = write_run(tmp_path / "run")
    assert cost.main([str(folder)]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "hours     7.4 node-hours, 19.7 GPU-hours, 29.6 core-hours"
    assert [line.split()[0] for line in lines if "restart" in line] == ["1", "2", "3"]
    assert cost.main([str(folder), "--json"]) == ExitCode.DONE
    data = json.loads(capsys.readouterr().out)
    assert data["total"]["node_hours"] == pytest.approx(7.4) and data["attempts"][1]["kwh"] is None
    assert data["lost"]["steps"] == 3 and data["jobs"][0]["starts_without_attempt"] == 1
    job = Job(JOB, "COMPLETED", 2, False, "", None)
    text = status.describe(folder, job, BEGAN + 9999, accounting_of(RunFiles(folder)))
    assert "\ncost     7.4 node-hours, 19.7 GPU-hours, 29.6 core-hours; 3.1 kWh in " in text
    assert report.main([str(folder)]) == ExitCode.DONE
    page = blocks((folder / "report.html").read_text())
    assert dict(page["data-0-overview"]["what"])["energy"].startswith("3.1 kWh in Slurm's accounting (1 job(s))")
    assert page["data-0-cost"]["total"]["core_hours"] == pytest.approx(29.6)
    capsys.readouterr()
    assert cost.main([str(tmp_path / "absent")]) == ExitCode.BAD_INPUT
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and "is not a run folder" in told.err
    (tmp_path / "project" / "slurm").mkdir(parents=True)  # as in a checkout, with scripts
    assert cost.main([str(tmp_path / "project")]) == ExitCode.BAD_INPUT
    assert "is not a run folder: it has none of" in capsys.readouterr().err


def test_only_the_runs_own_cluster_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path / "bin", *HETJOB)
    folder = write_run(tmp_path / "run")
    owner = json.loads((folder / "owners" / "0001").read_text())
    for number in (1, 2, 3):
        (folder / "owners" / f"{number:04d}").write_text(json.dumps(owner | {"cluster": "west"}))
    accounting_of(RunFiles(folder))
    assert "-M west -j 50 " in (tmp_path / "bin" / "called.txt").read_text()


def test_rows_of_the_newest_checkpoint_do_not_count_as_unsaved(tmp_path: Path) -> None:
    """Negative control: with a checkpoint of the last step nothing is at risk, whatever the state."""
    folder = alive(write_run(tmp_path / "run"))
    os.rename(folder / "checkpoints" / "step_000028", folder / "checkpoints" / "step_000030")
    for state in ("running: job 50", "lost: attempt 3 ended without a report", "unknown: x"):
        hours = run_hours(RunFiles(folder, state), now=BEGAN + 4200)
        assert hours.unsaved.steps == 0 and hours.all_lost.steps == 3
    write_rows(folder / "metrics.jsonl", range(33))
    assert run_hours(RunFiles(folder, "lost: x")).all_lost.steps == 5
