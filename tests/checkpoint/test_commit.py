"""The commit protocol, against real kills and real damage."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.checkpoint.best import Best
from hpcrl.checkpoint.commit import Facts, begin, commit, find_latest, list_files, seal_files
from hpcrl.checkpoint.failpoint import FAILPOINTS, failpoint
from hpcrl.checkpoint.state import STATE, encode_state, read_state
from hpcrl.system.files import steps_in

SAVE = """
import sys
from pathlib import Path
from tests.checkpoint.test_commit import save
save(Path(sys.argv[1]), int(sys.argv[2]), attempt=2)
"""


def save(root: Path, step: int, attempt: int = 1, keep: int = 2, fence=None, best: Best | None = None) -> Path:
    """A complete save: two shards in a subfolder and the small state."""
    folder = begin(root, step, attempt)
    (folder / "trainer").mkdir()
    for shard in range(2):
        (folder / "trainer" / f"__{shard}_0.distcp").write_bytes(f"weights of step {step}, shard {shard}".encode())
    names = [*list_files(folder), write_state(folder, small_state(step))]
    facts = Facts(attempt=attempt, world={"trainer": [1, 2]})
    return commit(root, step, folder, seal_files(folder, names), facts, keep=keep, fence=fence, best=best)


def write_state(folder: Path, state: dict) -> str:
    (folder / STATE).write_bytes(encode_state(state))
    return STATE


def small_state(step: int) -> dict:
    return {
        "cursor": {"uid": step},
        "scheduler": {"queue": [[1, 0]]},
        "counters": {"tokens": 2**60},
    }


def killed_save(root: Path, step: int, place: str) -> int:
    environment = os.environ | {"HPCRL_FAILPOINT": place, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([sys.executable, "-c", SAVE, str(root), str(step)], env=environment, check=False).returncode


def check_whole(root: Path, step: int) -> None:
    path, manifest, _ = find_latest(root)
    assert path is not None and manifest is not None and path.name == f"step_{step:06d}" and manifest.step == step
    assert len(manifest.files) == 3
    assert (path / "trainer/__1_0.distcp").read_bytes() == f"weights of step {step}, shard 1".encode()
    assert read_state(path) == small_state(step)


@pytest.mark.parametrize("place", FAILPOINTS)
def test_kill_at_every_sub_step_loses_nothing(tmp_path: Path, place: str) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    assert killed_save(tmp_path, 30, place) == -signal.SIGKILL

    committed = FAILPOINTS.index(place) >= FAILPOINTS.index("renamed")
    check_whole(tmp_path, 30 if committed else 20)
    assert {20} < set(steps_in(tmp_path)), "the checkpoint before the interrupted one is still there"
    named = (tmp_path / "LATEST").read_text().strip()
    assert named == ("step_000030" if place in ("latest_replaced", "best_named", "pruned") else "step_000020")

    # The next attempt repeats the interrupted step if it was not committed, then saves one more.
    if not committed:
        save(tmp_path, 30, attempt=3)
    save(tmp_path, 40, attempt=3)
    check_whole(tmp_path, 40)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step_000030", "step_000040"]


def test_failpoint_counts_its_hits_and_refuses_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert killed_save(tmp_path, 10, "renamed:2") == 0, "the second hit is asked for, one save has one"
    check_whole(tmp_path, 10)
    monkeypatch.setenv("HPCRL_FAILPOINT", "renamd")
    with pytest.raises(ValueError, match=r"HPCRL_FAILPOINT=renamd names no failpoint.*manifest_written"):
        failpoint("renamed")


def test_failpoints_in_the_code_are_the_failpoints_tested() -> None:
    source = (Path(__file__).parents[2] / "hpcrl/checkpoint/commit.py").read_text()
    assert [line.split('"')[1] for line in source.splitlines() if line.lstrip().startswith("failpoint(")] == list(
        FAILPOINTS
    )


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "harm", "said"),
    [
        ("trainer/__0_0.distcp", flip, "trainer/__0_0.distcp is not what was committed"),
        ("trainer/__0_0.distcp", truncate, "trainer/__0_0.distcp has 24 bytes, but 27 were committed"),
        ("trainer/__1_0.distcp", Path.unlink, "trainer/__1_0.distcp is missing"),
        ("state.json", Path.unlink, "state.json is missing"),
        ("manifest.json", truncate, "manifest.json cannot be read"),
        ("manifest.json", Path.unlink, "it has no manifest.json"),
        ("manifest.json", lambda path: path.write_text("{}"), "manifest.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_the_reason(tmp_path: Path, file: str, harm, said: str) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    assert find_latest(tmp_path).problems == []
    harm(tmp_path / "step_000020" / file)
    check_whole(tmp_path, 10)
    assert len(problems := find_latest(tmp_path).problems) == 1
    assert problems[0].startswith("skipping step_000020: ") and said in problems[0]


@pytest.mark.slow
def test_no_altered_byte_of_a_manifest_goes_unnoticed(tmp_path: Path) -> None:
    """Half of the bytes get one bit flipped that makes no UTF-8 of ASCII, the others a lower one."""
    for step in (10, 20):
        save(tmp_path, step)
    path = tmp_path / "step_000020/manifest.json"
    whole, original = path.read_bytes(), find_latest(tmp_path).manifest
    unnoticed = []
    for place in range(len(whole)):
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ (0x80 if place % 2 else 1 << place // 2 % 7)]) + whole[place + 1 :]
        )
        found = find_latest(tmp_path)
        if found.path == tmp_path / "step_000010":
            assert found.problems[0].startswith("skipping step_000020: manifest.json")
        elif found.manifest != original:
            unnoticed.append(place)
    assert unnoticed == []


@pytest.mark.parametrize(
    "content",
    [
        b'{"format\xff": 2}',
        b"[" * 100_000,
        b"null",
        b'{"format": 1e400}',
        b'{"format": 2, "step": 20, "facts": {"config_hash": "", "weight_version": 20, "attempt": 1, "world": {}}, '
        b'"files": []}',
        None,
    ],
)
def test_any_unreadable_manifest_is_damage(tmp_path: Path, content: bytes | None) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    path = tmp_path / "step_000020/manifest.json"
    path.unlink()
    path.mkdir() if content is None else path.write_bytes(content)
    check_whole(tmp_path, 10)
    (problem,) = find_latest(tmp_path).problems
    assert problem.startswith("skipping step_000020: manifest.json ")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"\xff\xfegarbage\n", r"'\\xff\\xfegarbage'"),
        (b"step_000010", "step_000010"),
        (b"\0" * 999, "'" + r"\x00" * 40 + "'"),
        (None, "nothing (it cannot be read: "),
    ],
)
def test_garbage_in_latest_is_named_and_does_not_end_the_run(tmp_path: Path, content: bytes | None, named: str) -> None:
    save(tmp_path, 20)
    (tmp_path / "LATEST").unlink()
    (tmp_path / "LATEST").mkdir() if content is None else (tmp_path / "LATEST").write_bytes(content)
    check_whole(tmp_path, 20)
    (problem,) = find_latest(tmp_path).problems
    assert problem.startswith(f"LATEST names {named}")


def test_a_format_1_checkpoint_without_a_checksum_loads(tmp_path: Path) -> None:
    save(tmp_path, 10)
    path = tmp_path / "step_000010/manifest.json"
    manifest = json.loads(path.read_bytes())
    assert manifest.pop("sha256")
    path.write_text(json.dumps(manifest | {"format": 1}))
    check_whole(tmp_path, 10)
    path.write_text(json.dumps(manifest))  # the current format, without a checksum
    with pytest.raises(ValueError, match=r"manifest\.json is not what was committed"):
        find_latest(tmp_path)


def test_a_checkpoint_of_an_earlier_version_loads_and_is_verified(tmp_path: Path) -> None:
    save(tmp_path, 10)
    path = tmp_path / "step_000010/manifest.json"
    manifest = json.loads(path.read_bytes())
    assert manifest["facts"] == {"attempt": 1, "world": {"trainer": [1, 2]}}
    manifest["facts"] = {"config_hash": "abc", "weight_version": 10, **manifest["facts"]}
    unsealed = json.dumps(manifest | {"sha256": ""}, separators=(",", ":")).encode()
    path.write_text(json.dumps(manifest | {"sha256": hashlib.sha256(unsealed).hexdigest()}))
    check_whole(tmp_path, 10)
    path.write_text(path.read_text().replace('"abc"', '"abd"'))
    with pytest.raises(ValueError, match=r"its checksum does not match its content"):
        find_latest(tmp_path)


def test_a_shard_of_a_newer_save_is_refused(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    shutil.copy(tmp_path / "step_000020/trainer/__1_0.distcp", tmp_path / "step_000010/trainer/__1_0.distcp")
    shutil.rmtree(tmp_path / "step_000020")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is usable .*from another save.*resume=fresh"):
        find_latest(tmp_path)


def test_a_renamed_folder_does_not_count_as_another_step(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    (tmp_path / "step_000020").rename(tmp_path / "step_000099")
    latest = find_latest(tmp_path)
    assert latest.path == tmp_path / "step_000010"
    assert "has format 2, step 20; expected 2 and 99" in latest.problems[1]


def test_junk_is_ignored_and_named(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "nowhere") == (None, None, [])
    assert find_latest(tmp_path) == (None, None, [])
    save(tmp_path, 10)
    (tmp_path / "step_000020.tmp-1").mkdir()
    (tmp_path / "step_abc").mkdir()
    (tmp_path / "step_000030").write_text("a file")
    (tmp_path / "step_000010" / "notes.txt").write_text("mine")
    latest = find_latest(tmp_path)
    assert latest.path == tmp_path / "step_000010"
    assert latest.problems == ["step_000010 contains extra files, ignored: notes.txt"]


def test_commit_needs_exactly_the_sealed_files(tmp_path: Path) -> None:
    folder = begin(tmp_path, 10, 1)
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")
    facts = Facts(attempt=1, world={})
    entries = seal_files(folder, ["a"])
    with pytest.raises(ValueError, match=r"differ in b$"):
        commit(tmp_path, 10, folder, entries, facts, keep=2)
    with pytest.raises(ValueError, match=r"differ in a$"):
        commit(tmp_path, 10, folder, [*entries, *seal_files(folder, ["a", "b"])], facts, keep=2)
    for name in ("c", "../a", "/etc/passwd", "manifest.json"):
        with pytest.raises(ValueError, match="is not a file of the checkpoint"):
            seal_files(folder, [name])
    assert steps_in(tmp_path) == []


def test_a_folder_moved_away_during_the_commit_is_reported_as_gone(tmp_path: Path) -> None:
    folder = begin(tmp_path / "checkpoints", 1, 1)
    entries = seal_files(folder, [write_state(folder, small_state(1))])
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    facts = Facts(attempt=1, world={})
    with pytest.raises(FileNotFoundError, match=re.escape(str(folder))):
        commit(tmp_path / "checkpoints", 1, folder, entries, facts, keep=2)
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(NotADirectoryError, match=re.escape(str(folder))):
        commit(tmp_path / "checkpoints", 1, folder, entries, facts, keep=2)


def test_a_fenced_attempt_commits_nothing(tmp_path: Path) -> None:
    save(tmp_path, 10)

    def superseded() -> None:
        raise RuntimeError("attempt 2 has taken over")

    with pytest.raises(RuntimeError, match="taken over"):
        save(tmp_path, 20, fence=superseded)
    check_whole(tmp_path, 10)
    with pytest.raises(ValueError, match="already committed"):
        begin(tmp_path, 10, 2)


def test_only_old_checkpoints_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "step_000050.tmp-7").mkdir()  # a later save of the same run that is still being written
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "LATEST",
        "step_000020",
        "step_000030",
        "step_000040",
        "step_000050.tmp-7",
    ]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"loss": float("nan")}, r"state\.counters\.loss is nan"),
        ({"by_uid": {3: 1}}, r"state\.counters\.by_uid has the key 3"),
        ({"list": [1, {2}]}, r"state\.counters\.list\[1\] is a set"),
    ],
)
def test_state_that_json_would_change_is_refused(tmp_path: Path, section: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        write_state(tmp_path, small_state(1) | {"counters": section})
    assert list(tmp_path.iterdir()) == []


def test_state_is_validated_when_written_and_when_read(tmp_path: Path) -> None:
    state = small_state(1) | {"reward_statistics": {"mean": 0.1 + 0.2, "pairs": (1, 2)}}
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state | {"reward_statistics": {"mean": 0.1 + 0.2, "pairs": [1, 2]}}
    with pytest.raises(ValueError, match=r"missing sections \['scheduler'\]"):
        write_state(tmp_path, {name: {} for name in ("cursor", "counters")})
    truncate(tmp_path / "state.json")
    with pytest.raises(ValueError, match=r"state\.json cannot be read"):
        read_state(tmp_path)
    (tmp_path / "state.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="has format 99, but this version reads 1"):
        read_state(tmp_path)


def test_a_checkpoint_moved_and_linked_by_a_user_is_read_and_left_in_place(tmp_path: Path) -> None:
    root, archive = tmp_path / "checkpoints", tmp_path / "archive"
    for step in (10, 20):
        save(root, step)
    (root / "step_000010").rename(archive)
    (root / "step_000010").symlink_to(archive)
    shutil.rmtree(root / "step_000020")
    check_whole(root, 10)
    for step in (30, 40):
        save(root, step)
    assert sorted(p.name for p in root.iterdir()) == ["LATEST", "step_000030", "step_000040"]
    assert (archive / "manifest.json").is_file()
    (root / "step_000050").symlink_to("nowhere")
    with pytest.raises(ValueError, match="step_000050 is a symbolic link to nowhere, which does not exist"):
        save(root, 50)
