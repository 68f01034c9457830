"""A model by its hub name: from the cache, from conf/ for a plan, and one clear line if it is not found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcrl.launch.__main__ import main
from hpcrl.launch.hub import find_model
from hpcrl.launch.prepare import prepare
from hpcrl.system.exit_codes import ExitCode
from tests.test_launch import SHORT, write_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, from a folder that holds nothing else."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def add(cache: Path, name: str) -> Path:
    """A snapshot in the layout of huggingface_hub."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return write_model(repository / "snapshots" / COMMIT)


def test_a_cached_model_is_used_and_its_folder_recorded(cache: Path) -> None:
    snapshot = add(cache, "org/tiny")
    config, _, model, *_ = prepare(["model.path=org/tiny", *SHORT])
    assert model is not None
    assert (config.model.path, model.path) == (str(snapshot), snapshot)


def test_a_folder_of_that_name_takes_precedence(cache: Path, tmp_path: Path) -> None:
    add(cache, "org/tiny")
    write_model(tmp_path / "org" / "tiny")
    assert find_model("org/tiny", plan_only=False) == "org/tiny"


@pytest.mark.parametrize("dry_run", ["true", "false"])
def test_a_missing_model_is_reported_in_one_line(cache: Path, dry_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model.path=org/tiny", f"dry_run={dry_run}"]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err.splitlines() == [
        "model.path: org/tiny is neither a folder nor in the local Hugging Face cache; on a machine with network "
        f"access, run: {sys.executable} -m hpcrl prefetch org/tiny (override 'model.path=org/tiny')"
    ]


def test_the_bundled_config_is_used_only_for_plans(cache: Path) -> None:
    folder = Path(find_model("Qwen/Qwen3-235B-A22B", plan_only=True))
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    with pytest.raises(ValueError, match="nor in the local Hugging Face cache"):
        find_model("Qwen/Qwen3-235B-A22B", plan_only=False)


def test_a_missing_folder_is_not_taken_for_a_hub_name(cache: Path, tmp_path: Path) -> None:
    """Of a conversion, or beside folders that exist."""
    with pytest.raises(ValueError, match="no folder openai/gpt-oss-20b-bf16, which is made of openai/gpt-oss-20b: "):
        find_model("openai/gpt-oss-20b-bf16", plan_only=False)
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="no folder Qwen3 in the folder out, and no such name in the local Hugging"):
        find_model("out/Qwen3", plan_only=False)


@pytest.mark.parametrize("path", ["/nowhere/at/all", "nowhere", "./org/tiny", "a/b/c"])
def test_a_name_that_is_not_a_hub_name_is_a_folder(cache: Path, path: str) -> None:
    assert find_model(path, plan_only=False) == path
