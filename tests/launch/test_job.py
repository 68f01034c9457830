"""The output of `hpcrl.launch.job begin` for the batch script, and how a job ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpcrl.cluster import slurm
from hpcrl.config import Config, ConfigError
from hpcrl.launch.job import begin, end, main
from hpcrl.run_folder import OUTCOME, last_end, open_run, read_refusal, record_submission, world_folder
from hpcrl.system import log
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import step_name
from hpcrl.system.log import message_of


def test_a_refused_start_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "slurm").mkdir(parents=True)
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    with pytest.raises(ConfigError, match="none"):
        begin([f"run_dir={run_dir}", f"model.path={tmp_path}/none"])
    told = read_refusal(run_dir)
    assert told["job"] == 71 and any("model.path" in line for line in told["problems"])


@pytest.mark.slow
def test_output_of_libraries_does_not_reach_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    # Making a row of this task prints a dot.
    assert begin(["data.train=reasoning_gym:bf", f"run_dir={run_dir}"]) == ExitCode.DONE
    shown = capsys.readouterr()
    assert (shown.out, set(shown.err)) == (f"1 0 50 {run_dir}\n", {"."}), (
        "attempt, no end, a tenth of 900 / 2 + 2 x 10 + 30 s"
    )


def test_a_job_with_a_different_number_of_nodes_opens_no_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log.start("launch", console="stderr")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert main(["begin", f"run_dir={tmp_path / 'run'}"]) == ExitCode.BAD_INPUT
    assert message_of(capsys.readouterr().err).startswith("the job has 2 nodes, the layout needs 1; submit with")
    assert not (tmp_path / "run").exists()


def test_starting_over_within_a_job_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A requeued job would begin in a new folder every time."""
    log.start("launch", console="stderr")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert main(["begin", f"run_dir={tmp_path / 'run'}", "resume=fresh"]) == ExitCode.BAD_INPUT
    assert message_of(capsys.readouterr().err).startswith("resume: fresh would start over")
    assert not (tmp_path / "run").exists()


SCONTROL = """\
#!/bin/sh
echo "$*" >> {folder}/calls
if [ "$(wc -l < {folder}/calls)" -le {silent} ]; then
    echo "slurm_load_jobs error: {error}" >&2; exit 1
fi
echo "JobId=7 JobState=RUNNING Restarts=0 PreemptTime=None Reason=None EndTime=Unknown"
"""


def make_scontrol(folder: Path, silent: int, error: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A replacement of scontrol that fails so many times; returns the file with its calls."""
    program = folder / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(SCONTROL.format(folder=folder, silent=silent, error=error))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "AGAIN_S", 0.0)
    return folder / "calls"


def stopped_run(folder: Path, monkeypatch: pytest.MonkeyPatch, code: ExitCode = ExitCode.REQUEUE) -> Path:
    """A run in job 7 that ended with a code, by default to be requeued."""
    config = Config.model_validate({"cluster": {"name": "slurm"}}).model_dump(mode="json")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = open_run(config, folder / "run", "auto")
    world = world_folder(run.run_dir, run.attempt)
    world.mkdir(parents=True)
    (world / OUTCOME).write_text(f'{{"code": {int(code)}}}')
    return run.run_dir


def test_the_end_of_a_job_waits_for_an_unresponsive_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = stopped_run(tmp_path, monkeypatch)
    calls = make_scontrol(tmp_path, 2, "Unable to contact slurm controller (connect failure)", monkeypatch)
    assert end(run_dir, 1, 75) == ExitCode.REQUEUE
    assert calls.read_text().splitlines() == [*["--oneliner show job 7"] * 3, "requeue 7"]
    assert last_end(run_dir)["goes_on"] is True


def test_the_end_of_a_job_asks_once_if_slurm_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    run_dir = stopped_run(tmp_path, monkeypatch)
    calls = make_scontrol(tmp_path, 2, "Access/permission denied", monkeypatch)
    with pytest.raises(slurm.SlurmError, match="denied"):
        end(run_dir, 1, 75)
    assert len(calls.read_text().splitlines()) == 1


TAKEN = {
    "preempted": "JobState=COMPLETING PreemptTime=5 Reason=None",
    "time": "JobState=COMPLETING PreemptTime=None Reason=TimeLimit",
    "cancelled": "JobState=COMPLETING PreemptTime=None Reason=None",
    "": "JobState=RUNNING PreemptTime=None Reason=None",
}


def end_with(
    run_dir: Path, code: int | None, taken: str, monkeypatch: pytest.MonkeyPatch, step: int = 0, job: int = 7
) -> str:
    """Open an attempt in the job and end it with this code (None: no verdict of its agents); returns the reason."""
    program = run_dir.parent / "bin" / "scontrol"
    program.parent.mkdir(exist_ok=True)
    answer = f"JobId={job} Restarts=0 EndTime=Unknown {TAKEN[taken]}"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", str(job))
    config = Config.model_validate({"cluster": {"name": "slurm"}}).model_dump(mode="json")
    attempt = open_run(config, run_dir, "auto").attempt
    world = world_folder(run_dir, attempt)
    world.mkdir(parents=True)
    if code is not None:
        (world / OUTCOME).write_text(f'{{"code": {code}}}')
    end(run_dir, attempt, step)
    return str(last_end(run_dir)["why"])


def save(run_dir: Path, step: int) -> None:
    (run_dir / "checkpoints" / step_name(step)).mkdir(parents=True)


@pytest.mark.slow
def test_too_short_jobs_are_not_requeued_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    for _ in range(3):
        assert "resumes" in end_with(run_dir, ExitCode.REQUEUE, "", monkeypatch)
    save(run_dir, 3)
    short = [(ExitCode.REQUEUE, ""), (None, "time"), (ExitCode.TERMINATED, "time"), (ExitCode.REQUEUE, "time")]
    for code, taken in [short[0], (ExitCode.REQUEUE, "preempted"), *short[1:], (None, "preempted")]:
        assert "resumes from its checkpoint" in end_with(run_dir, code, taken, monkeypatch)
    assert end_with(run_dir, ExitCode.REQUEUE, "", monkeypatch) == (
        "5 jobs in a row ended before a new checkpoint: does not resume; "
        "raise cluster.time, or lower cluster.signal_lead_s or save_every"
    )
    assert last_end(run_dir)["goes_on"] is False


def test_on_a_full_disk_a_job_ends_with_its_steps_code_and_is_not_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the agent's verdict nor the count of crashes fits on the disk."""
    run_dir = tmp_path / "run"
    assert end_with(run_dir, None, "", monkeypatch, step=ExitCode.NOT_SAVED).startswith("crash 1 of at most 3")
    (run_dir / ".restarts.json.tmp").symlink_to("/dev/full")
    why = end_with(run_dir, None, "", monkeypatch, step=ExitCode.NOT_SAVED)
    assert why.startswith("[Errno 28] No space left on device: ") and why.endswith("does not resume")
    assert (last_end(run_dir)["how"], last_end(run_dir)["goes_on"]) == ("not_saved", False)


@pytest.mark.slow
def test_a_manual_resubmission_resets_the_crash_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    said = [end_with(run_dir, ExitCode.RANK_KILLED, "", monkeypatch) for _ in range(4)]
    assert said[0].startswith("crash 1 of at most 3") and said[3].startswith("crash 4 without a new checkpoint")
    assert end_with(run_dir, ExitCode.RANK_KILLED, "", monkeypatch, job=8).startswith("crash 1 of at most 3")


def test_crashes_of_all_links_of_a_chain_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "slurm").mkdir(parents=True)
    record_submission(run_dir, [7, 8, 9])
    said = [end_with(run_dir, ExitCode.DEADLINE, "", monkeypatch, job=job) for job in (7, 8, 9)]
    assert [text.split(" of")[0] for text in said] == ["crash 1", "crash 2", "crash 3"]


@pytest.mark.parametrize(
    ("number", "taken", "why"),
    [
        (signal.SIGUSR1, "", "resumes from its checkpoint"),
        (signal.SIGTERM, "preempted", "resumes from its checkpoint"),
        (signal.SIGTERM, "cancelled", "the job was cancelled"),
        (signal.SIGTERM, "", "does not resume by itself"),
        (signal.SIGKILL, "", "crash 1 of at most 3"),
    ],
)
def test_agents_ended_during_imports_get_the_outcome_of_their_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, taken: str, why: str
) -> None:
    assert end_with(tmp_path / "run", None, taken, monkeypatch, step=128 + number).startswith(why)


def test_a_checkpoint_is_committed_once_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The crash came before LATEST named the new checkpoint; the next one, without a new one, is one too many."""
    config = Config.model_validate({"cluster": {"name": "slurm", "max_restarts": 1}}).model_dump(mode="json")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    make_scontrol(tmp_path, 0, "", monkeypatch)
    for attempt, goes_on in ((1, True), (2, True), (3, False)):
        run = open_run(config, tmp_path / "run", "auto")
        world = world_folder(run.run_dir, attempt)
        world.mkdir(parents=True)
        (world / OUTCOME).write_text(f'{{"code": {ExitCode.RANK_KILLED}}}')
        if attempt == 2:
            (run.run_dir / "checkpoints" / "step_000004").mkdir(parents=True)
        assert end(run.run_dir, attempt, 11) == ExitCode.RANK_KILLED
        assert last_end(run.run_dir)["goes_on"] is goes_on


@pytest.mark.slow
def test_failing_saves_are_crashes_and_failing_reads_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = make_scontrol(tmp_path, 0, "", monkeypatch)
    for code, requeued in ((ExitCode.NOT_SAVED, [True, True, True, False]), (ExitCode.CHECKPOINT, [False])):
        (folder := tmp_path / code.name).mkdir()
        run_dir = stopped_run(folder, monkeypatch, code)
        for goes_on in requeued:
            calls.unlink(missing_ok=True)
            assert end(run_dir, 1, int(code)) == code
            assert last_end(run_dir)["goes_on"] is goes_on
            assert ("requeue 7" in calls.read_text().splitlines()) is goes_on
