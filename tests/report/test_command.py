"""`hpcrl report`: what it writes and where, of runs in every state, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hpcrl.commands.report import main
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT
from tests.report.synthetic import write_run
from tests.report.test_page import blocks


def overview(path: Path, number: int = 0) -> dict:
    return blocks(path.read_text())[f"data-{number}-overview"]


def test_the_report_of_a_run_is_in_its_folder_and_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    before = sorted(path.name for path in folder.iterdir())
    assert main([str(folder)]) == ExitCode.DONE
    assert capsys.readouterr().out == f"{folder}/report.html\n"
    assert dict(overview(folder / "report.html")["what"])["state"].startswith("finished: trained 30 steps")
    assert main([str(folder)]) == ExitCode.DONE  # a second time, over the first
    assert sorted(path.name for path in folder.iterdir()) == sorted([*before, "report.html"])


def test_several_runs_in_a_file_and_in_a_folder(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / place / name)) for place, name in (("a", "run"), ("b", "run"), ("b", "index"))]
    assert main([*runs, runs[0], "--out", str(tmp_path / "one.html")]) == ExitCode.DONE
    assert [len(overview(tmp_path / "one.html", number)["attempts"]) for number in range(3)] == [3, 3, 3]
    out = tmp_path / "out"
    assert main([*runs, "--out", str(out)]) == ExitCode.DONE
    names = ["index-2.html", "index.html", "run-2.html", "run.html", "together.html"]
    assert sorted(path.name for path in out.iterdir()) == names
    index = (out / "index.html").read_text()
    assert all(f'href="./{name}"' in index for name in names if name != "index.html") and "<script" not in index


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["{folder}/absent"], "{folder}/absent is not a run folder"),
        (["{folder}"], "{folder} is not a run folder: it has none of config.yaml"),
        (
            ["{folder}/run", "{folder}/run2"],
            "2 runs in one report need a place for it: --out FILE.html or --out FOLDER",
        ),
        (["{folder}/run", "--out", "{folder}/file/x.html"], "{folder}/file/x.html cannot be written: "),
        (["{folder}/run", "--out", "{folder}/file"], "{folder}/file/run.html cannot be written: "),
        ([], "the following arguments are required: RUN"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run", "run2"):
        write_run(tmp_path / name)
    (tmp_path / "file").touch()
    assert main([word.format(folder=tmp_path) for word in arguments]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert error.format(folder=tmp_path) in told and told.count("\n") == 1


def test_a_run_that_is_damaged_in_many_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "facts.json").write_text(
        '{"attempts": [{"attempt": 1, "versions": 3, "changes": "x"}, 7, {"attempt": "a"}]}'
    )
    (folder / "owners" / "0002").write_text("")
    (folder / "owners" / "0003").write_text('["job"]')
    (folder / "errors.json").write_text('{"errors": [{"count": "many"}]}')
    (folder / "finished.json").unlink()
    (folder / "finished.json").mkdir()
    (folder / "config.yaml").write_text("a: [1\nb: {")
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\xfe\x00\n{"step": "x"}\n{"step": 31, "critic/rewards/mean": 1e999}\n{"step": 32, "critic/rew')
    assert main([str(folder)]) == ExitCode.DONE
    told = capsys.readouterr().err
    for name in ("owners/0003", "errors.json", "finished.json", "config.yaml"):
        assert f"hpcrl: {folder}: {name}: " in told
    data = overview(folder / "report.html")
    assert [attempt["number"] for attempt in data["attempts"]] == [1, 2, 3]
    curves = blocks((folder / "report.html").read_text())["data-0-curves"]
    assert max(map(max, curves["grids"])) == 31


def test_runs_of_other_versions_and_without_checkpoints_or_start(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "old")
    # As 0.4.0 wrote them: keys and metrics with other names, facts without versions.
    (folder / "config.yaml").write_text("run_name: old\nmax_steps: 3\nno_longer: {a: 1}\n")
    (folder / "facts.json").write_text('{"attempts": [{"start": "2025-01-01T00:00:00", "host": "n1"}]}')
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "time/step_hand_over": 2.0, "scheduler/version_lag/mean": 1.0}\n'
    )
    assert main([str(folder)]) == ExitCode.DONE
    curves = blocks((folder / "report.html").read_text())["data-0-curves"]["curves"]
    assert set(curves) == {"time/step_rollout_transfer", "scheduler/staleness/mean"}
    planned = tmp_path / "planned"
    (planned / "slurm").mkdir(parents=True)
    (planned / "slurm" / "submitted.yaml").write_text("run_name: planned\npipeline: rlvr\n")
    (planned / "plan.txt").write_text("nodes  2\n")
    assert main([str(planned)]) == ExitCode.DONE
    data = overview(planned / "report.html")
    assert data["attempts"] == [] and data["plan"] == "nodes  2\n"
    assert ["state", "never started"] in data["what"] and ["pipeline", "rlvr"] in data["what"]


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_users_run_without_permission_on_parts() -> None:
    """As user nobody: what may not be read is named, the rest is shown, and the run folder cannot be written."""
    above = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        above.chmod(0o755)
        folder = write_run(above / "run")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        for name in ("facts.json", "logs", "metrics.jsonl"):
            (folder / name).chmod(0)
        program = (
            "import os, sys, hpcrl.commands.report as report\n"
            "assert report.main([sys.argv[1], '--out', sys.argv[2]]) == 0  # nobody may not import from root's Python\n"
            "os.setgid(65534); os.setuid(65534)\n"
            "sys.exit(report.main(sys.argv[3:]))\n"
        )
        run = [sys.executable, "-c", program, str(write_run(above / "first")), str(above / "first.html"), str(folder)]
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        refused = subprocess.run(run, env=environ, capture_output=True, text=True, timeout=100, check=False)
        assert refused.returncode == ExitCode.BAD_INPUT, refused.stderr
        assert f"{folder}/report.html cannot be written: Permission denied; choose another place" in refused.stderr
        out = above / "out"
        out.mkdir()
        out.chmod(0o777)
        run += ["--out", str(out / "x.html")]
        done = subprocess.run(run, env=environ, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        for name in ("facts.json", "metrics.jsonl", "logs/attempt_0001/rank_0000.log"):
            assert f"{folder}: {name}: Permission denied" in done.stderr
        assert len(overview(out / "x.html")["attempts"]) == 3
        folder.chmod(0)
        done = subprocess.run(run, env=environ, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == ExitCode.BAD_INPUT and "Permission denied" in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
    finally:
        shutil.rmtree(above)


def test_half_written_owner_of_a_live_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "finished.json").unlink()
    (folder / "owners" / "0004").write_text(json.dumps({"since": "2026-11-28T20:00:00+00:00"})[:20])
    assert main([str(folder)]) == ExitCode.DONE
    assert [attempt["number"] for attempt in overview(folder / "report.html")["attempts"]] == [1, 2, 3, 4]
