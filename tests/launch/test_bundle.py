"""hpcrl bundle: what it collects, that nothing is lost on the way, and that a bad archive or disk leaves nothing."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from hpcrl.launch import __main__ as launch
from hpcrl.launch.bundle import trial, unpacking, writing
from hpcrl.launch.bundle.archive import verify
from hpcrl.launch.bundle.collecting import collect
from hpcrl.launch.bundle.command import main
from hpcrl.launch.bundle.layout import MANIFEST, encoded
from hpcrl.launch.bundle.offline import OFF
from hpcrl.launch.bundle.unpacking import unpack, verify_folder
from hpcrl.launch.bundle.writing import with_digests, write_bundle
from hpcrl.launch.prepare import prepare
from hpcrl.node.caches import cache_folders
from hpcrl.system.exit_codes import ExitCode
from tests import in_process
from tests.conftest import ROOT
from tests.disks import small_file_system
from tests.test_launch import SHORT, write_model

WORDS = (
    "model.path=model",
    "reference.path=reference",
    "algorithm.kl_loss_coef=0.1",
    "data.train=rows/*.jsonl",
    "reward.default.name=function",
    "reward.default.function=code/bundled_reward.py:score",
    "layout=single",
    "run_name=bundled",
    *SHORT,
)
PLAIN = ("model.path=model", "data.train=rows/*.jsonl", "reward.default.name=math", "run_name=bundled", *SHORT)
REWARD = """\
import errno, socket
import bundled_helper

def score(ground_truth, response):
    if bundled_helper.NEEDS_NO_NETWORK:
        try:
            socket.create_connection(("192.0.2.1", 9), 5)
        except OSError as error:
            assert error.errno == errno.ENETUNREACH, error
        else:
            raise AssertionError("there is a network")
    return float(len(response) % 2), True
"""


def command(*words: str | Path, at: Path) -> subprocess.CompletedProcess[str]:
    return in_process.run(main, *map(str, words), at=at)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a copy of it as reference, rows in two files, and a reward that imports another file."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("rows", "code"):
        (folder / name).mkdir()
    write_model(folder / "model")
    shutil.copytree(folder / "model", folder / "reference")
    for number in range(2):
        lines = [json.dumps({"prompt": f"say {n}", "answer": str(n)}) for n in range(number, 8, 2)]
        (folder / "rows" / f"part-{number}.jsonl").write_text("\n".join(lines))
    (folder / "code" / "bundled_reward.py").write_text(REWARD)
    (folder / "code" / "bundled_helper.py").write_text("NEEDS_NO_NETWORK = False\n")
    return folder


@pytest.fixture(scope="module")
def archive(project: Path) -> Path:
    done = command(*WORDS, "--no-caches", "--out", "made.tar", at=project)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert done.stdout.startswith("models  6 files")
    return project / "made.tar"


def test_a_bundle_starts_without_the_files_it_was_made_of(project: Path, archive: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    done = command("--unpack", archive, "--to", there, at=tmp_path)
    assert done.returncode == ExitCode.DONE, done.stderr
    files = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    names = ("config.json", "model.safetensors", "tokenizer.json")
    assert files == {
        *(f"models/{number}/{name}" for number in range(2) for name in names),
        *(f"data/0/part-{number}.jsonl" for number in range(2)),
        *(f"code/0/bundled_{name}.py" for name in ("helper", "reward")),
        *("config.yaml", "env.sh", "manifest.json"),
    }
    for name in names:  # equal files are stored once
        copies = [there / f"models/{number}/{name}" for number in range(2)]
        assert copies[0].samefile(copies[1]) and copies[0].read_bytes() == (project / "model" / name).read_bytes()
    hidden = project.rename(project.with_name("hidden"))
    try:
        done = in_process.run(launch.main, "--config", str(there / "config.yaml"), "dry_run=true", at=tmp_path)
    finally:
        hidden.rename(project)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert f"data    train {there}/data/0/*.jsonl (8 rows in 2 files: 4 + 4)" in done.stdout
    assert str(project) not in (there / "config.yaml").read_text()


def test_other_programs_read_the_archive_and_find_the_same_digests(archive: Path, tmp_path: Path) -> None:
    subprocess.run(["tar", "xf", archive], cwd=tmp_path, check=True)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["words"] == list(WORDS) and manifest["versions"]["python"] == sys.version.split()[0]
    lines = [f"{file['sha256']}  objects/{file['sha256']}" for file in manifest["files"]]
    words = {"cwd": tmp_path, "input": "\n".join(lines), "text": True, "capture_output": True}
    done = subprocess.run(["sha256sum", "-c"], **words, check=False)
    assert done.returncode == 0, done.stderr
    assert len(manifest["files"]) == 10 and len(list((tmp_path / "objects").iterdir())) == 7
    assert archive.read_bytes()[: 512 * 2].startswith(b"manifest.json")


def test_equal_inputs_make_equal_archives_and_nothing_is_overwritten(
    project: Path, archive: Path, tmp_path: Path
) -> None:
    before = archive.read_bytes()
    done = command(*WORDS, "--no-caches", "--out", tmp_path / "again.tar", at=project)
    assert done.returncode == ExitCode.DONE and (tmp_path / "again.tar").read_bytes() == before
    done = command(*WORDS, "--no-caches", "--out", archive, at=project)
    assert done.returncode == ExitCode.BAD_INPUT
    assert done.stderr == f"hpcrl bundle: --out {archive}: exists already; remove it, or give another name\n"
    assert archive.read_bytes() == before


def small_bundle(folder: Path, suffix: str = ".tar", num_bytes: int = 5000) -> Path:
    """An archive with two files, of which one cannot be compressed."""
    folder.mkdir(exist_ok=True)
    files = {"data/0/a": folder / "a", "data/0/b": folder / "b"}
    files["data/0/a"].write_bytes(os.urandom(num_bytes))
    files["data/0/b"].write_bytes(b"text\n" * 100)
    manifest = manifest_of({"data": {"train": "data/0/b"}}, [["data", "train"]])
    out = folder / f"small{suffix}"
    write_bundle(out, with_digests(manifest, files), files)
    return out


def manifest_of(config: dict[str, Any], paths: list[list[str | int]]) -> Any:
    return msgspec.convert(
        {"format": "hpcrl-bundle-1", "versions": {}, "words": [], "config": config, "paths": paths, "files": []},
        unpacking.BundleManifest,
    )


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst"])
def test_an_archive_that_is_cut_short_anywhere_leaves_nothing(tmp_path: Path, suffix: str) -> None:
    out = small_bundle(tmp_path / "made", suffix)
    assert verify(out) == 5500
    content = out.read_bytes()
    for size in (0, 100, 700, len(content) // 2, len(content) - 600):
        cut = tmp_path / f"cut{suffix}"
        cut.write_bytes(content[:size])
        with pytest.raises(ValueError, match=re.escape(str(cut))):
            verify(cut)
        with pytest.raises(ValueError, match=r"cut short|cannot be read|no header"):
            unpack(cut, tmp_path / "there", 5)
        assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".there.lock") == [
            f"cut{suffix}",
            "made",
        ]


def test_a_changed_byte_is_found_and_leaves_nothing(tmp_path: Path) -> None:
    out = small_bundle(tmp_path / "made")
    content = bytearray(out.read_bytes())
    content[content.index(b"text\ntext") + 3] ^= 1
    out.write_bytes(content)
    with pytest.raises(ValueError, match=r"objects/\w{64} is damaged"):
        unpack(out, tmp_path / "there", 5)
    assert not list(tmp_path.glob("*there")) and not list(tmp_path.glob(".*partial"))


def test_a_file_that_changes_while_it_is_bundled_leaves_nothing(tmp_path: Path) -> None:
    file, out = tmp_path / "a", tmp_path / "out.tar"
    for change in (b"other", b"longer than before", b"less"[:2]):
        file.write_bytes(b"first")
        manifest = with_digests(manifest_of({}, []), {"data/0/a": file})
        file.write_bytes(change)
        with pytest.raises(ValueError, match=f"{file}: changed while it was bundled"):
            write_bundle(out, manifest, {"data/0/a": file})
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


FileEdit = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda m: m["files"][0].update(path="../outside"), "not a path inside"),
        (lambda m: m["files"][0].update(path="/tmp/outside"), "not a path inside"),
        (lambda m: m["files"][0].update(path="data/../../outside"), "not a path inside"),
        (lambda m: m["files"][0].update(path="data/0/a\nb"), "not a path inside"),
        (lambda m: m["files"][0].update(path="data/" + "x" * 256), "not a path inside"),
        (lambda m: m["files"][0].update(path="config.yaml"), "in none of the folders"),
        (lambda m: m["files"][1].update(path="data/0/a/b"), "as a file and as a folder"),
        (lambda m: m["files"][1].update(path="data/0/a"), "twice or out of order"),
        (lambda m: m["files"][1].update(sha256=m["files"][0]["sha256"]), "two sizes"),
        (lambda m: m["files"][0].update(sha256="../../outside"), "cannot be read"),
        (lambda m: m["files"][0].update(size=-1), "cannot be read"),
        (lambda m: m["files"][0].update(size=1), "has 5000 bytes, manifest.json says 1"),
        (lambda m: m["config"]["data"].update(train="../../secret"), "not a path inside"),
        (lambda m: m["paths"].append(["data", "absent", 0]), "no path at data.absent.0"),
        (lambda m: m.update(format="hpcrl-bundle-9"), "has the format 'hpcrl-bundle-9'"),
        (lambda m: m.update(more=1), "cannot be read"),
    ],
)
def test_a_hostile_manifest_is_refused_before_a_file_is_made(tmp_path: Path, edit: FileEdit, problem: str) -> None:
    out = small_bundle(tmp_path / "made")
    with tarfile.open(out) as opened:
        members = [(member, opened.extractfile(member).read()) for member in opened]  # type: ignore[union-attr]
    manifest = json.loads(members[0][1])
    edit(manifest)
    write_tar(out, [(tarfile.TarInfo(MANIFEST), json.dumps(manifest).encode()), *members[1:]])
    check_refused(out, problem)


def write_tar(out: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    with tarfile.open(out, "w", format=tarfile.GNU_FORMAT) as opened:
        for member, content in members:
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))


def check_refused(out: Path, problem: str) -> None:
    """Unpacking fails in one line, and makes no file."""
    place = out.parents[1] / "place"
    place.mkdir()
    with pytest.raises(ValueError, match=problem) as caught:
        unpack(out, place / "there", 5)
    assert "\n" not in str(caught.value)
    assert {path.name for path in place.iterdir()} <= {".there.lock"}
    assert {path.name for path in out.parents[1].iterdir()} == {"made", "place"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "of type b'2'"),
        ({"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"}, "of type b'1'"),
        ({"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5}, "of type b'3'"),
        ({"type": tarfile.FIFOTYPE}, "of type b'6'"),
        ({"type": tarfile.DIRTYPE}, "of type b'5'"),
        ({"type": tarfile.GNUTYPE_LONGNAME}, "of type b'L'"),
        ({"type": tarfile.XHDTYPE}, "of type b'x'"),
        ({"mode": 0o4755}, "mode 4755"),
        ({"name": "../outside"}, "a member '../outside' where objects/"),
        ({"name": "/tmp/outside"}, "a member '/tmp/outside' where objects/"),
    ],
)
def test_a_hostile_member_is_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    out = small_bundle(tmp_path / "made")
    with tarfile.open(out) as opened:
        members = [(member, opened.extractfile(member).read()) for member in opened]  # type: ignore[union-attr]
    for name, value in change.items():
        setattr(members[1][0], name, value)
    blocks = [member.tobuf(tarfile.GNU_FORMAT) + text + bytes(-len(text) % 512) for member, text in members]
    out.write_bytes(b"".join(blocks) + bytes(1024))
    check_refused(out, problem)


def test_members_after_the_last_one_are_refused(tmp_path: Path) -> None:
    out = small_bundle(tmp_path / "made")
    content = out.read_bytes()
    extra = tarfile.TarInfo("objects/more").tobuf(tarfile.GNU_FORMAT)
    out.write_bytes(content[:-1024] + extra + bytes(1024))
    check_refused(out, "members after those of manifest.json")
    out.write_bytes(content + bytes(9216))  # as GNU tar fills its record
    assert verify(out) == 5500
    out.write_bytes(content + bytes(512) + extra)
    with pytest.raises(ValueError, match="data after the last member"):
        verify(out)


def test_a_full_disk_is_told_before_and_while_an_archive_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = small_bundle(tmp_path / "made", num_bytes=3 << 20)
    (tmp_path / "disk").mkdir()
    with small_file_system(tmp_path / "disk", 2) as disk:
        files = {"data/0/a": tmp_path / "made" / "a"}
        manifest = with_digests(manifest_of({}, []), files)
        monkeypatch.setattr("hpcrl.system.files.CONTENDED_S", 0.1)
        with pytest.raises(ValueError, match=r"up to 3 MiB are needed in .*: 2 MiB are free"):
            write_bundle(disk / "out.tar", manifest, files)
        with pytest.raises(ValueError, match=r"3.01 MiB are needed in .*: 2 MiB are free"):
            unpack(made, disk / "there", 5)
        for module in (writing, unpacking):  # as if another process filled the disk afterwards
            monkeypatch.setattr(module, "find_room", lambda *args, **more: (1 << 40, ""))
        for suffix in (".tar", ".tar.zst"):
            with pytest.raises(OSError, match="No space left on device") as caught:
                write_bundle(disk / f"out{suffix}", manifest, files)
            assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(disk / f"out{suffix}")
        assert [path.name for path in disk.iterdir()] == [".there.lock"]
        done = command("--unpack", made, "--to", disk / "there", at=tmp_path)
        assert done.returncode == ExitCode.NOT_SAVED, done.stderr
        assert done.stderr.startswith("hpcrl bundle: [Errno 28] No space left on device: ")
        assert [path.name for path in disk.iterdir()] == [".there.lock"]


def test_one_process_unpacks_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, there, said = small_bundle(tmp_path / "made"), tmp_path / "there", list[str]()
    begun, may_end, room = threading.Event(), threading.Event(), unpacking.find_room

    def slow_room(*args: Any, **more: Any) -> Any:
        assert not begun.is_set(), "a second process unpacks"
        begun.set()
        assert may_end.wait(30)
        return room(*args, **more)

    monkeypatch.setattr(unpacking, "find_room", slow_room)
    threads = [threading.Thread(target=lambda: said.append(unpack(made, there, 30))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    with pytest.raises(ValueError, match=r"another process has not finished after 0.2 s"):
        unpack(made, there, 0.2)
    may_end.set()
    for thread in threads:
        thread.join(30)
    assert sorted("already" in line for line in said) == [False, True, True]
    assert verify_folder(there) == 5500


def test_what_a_killed_process_left_is_removed_but_nothing_of_others(tmp_path: Path) -> None:
    made, left = small_bundle(tmp_path / "made"), tmp_path / ".there.partial"
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    left.symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=r"\.there\.partial: not left by an unpacking"):
        unpack(made, tmp_path / "there", 5)
    assert (tmp_path / "outside" / "kept").exists()
    left.unlink()
    (left / "data").mkdir(parents=True)
    (left / "data" / "half").touch()
    unpack(made, tmp_path / "there", 5)
    assert not left.exists() and not (tmp_path / "there" / "data" / "half").exists()


def test_a_second_unpacking_finds_what_was_edited(tmp_path: Path) -> None:
    made, there = small_bundle(tmp_path / "made"), tmp_path / "there"
    unpack(made, there, 5)
    assert unpack(made, there, 5) == f"{there} holds {made} already"
    file = there / "data" / "0" / "b"
    file.write_bytes(b"next\n" * 100)
    done = command("--check", there, at=tmp_path)
    assert done.returncode == ExitCode.BAD_INPUT
    assert done.stderr == f"hpcrl bundle: {file}: changed since it was unpacked; remove {there} and unpack again\n"
    file.write_bytes(b"text")
    with pytest.raises(ValueError, match=f"{file}: has 4 bytes instead of 500"):
        unpack(made, there, 5)
    other = small_bundle(tmp_path / "other", num_bytes=10)
    with pytest.raises(ValueError, match=f"{there}: holds another bundle than {other}"):
        unpack(other, there, 5)
    (tmp_path / "full").mkdir()
    with pytest.raises(ValueError, match="exists and holds no bundle"):
        unpack(made, tmp_path / "full", 5)


def test_an_unpacked_folder_that_was_moved_or_lacks_its_configuration_is_told(tmp_path: Path) -> None:
    made, there, moved = small_bundle(tmp_path / "made"), tmp_path / "there", tmp_path / "moved"
    unpack(made, there, 5)
    config = (there / "config.yaml").read_text()
    there.rename(moved)
    with pytest.raises(ValueError, match=f"{moved}: was moved: config.yaml names {there}/data/0/b; remove {moved} and"):
        unpack(made, moved, 5)
    moved.rename(there)
    (there / "config.yaml").write_text(f"{config}max_steps: 5\n")
    assert unpack(made, there, 5) == f"{there} holds {made} already", "a user may edit it"
    for name in ("config.yaml", "env.sh"):
        (there / name).rename(tmp_path / name)
        with pytest.raises(ValueError, match=f"{there / name}: is missing; remove {there} and unpack again"):
            unpack(made, there, 5)
        (tmp_path / name).rename(there / name)


def test_a_configuration_without_all_sections_can_be_started(tmp_path: Path) -> None:
    """A manifest by hand, or of a version without a section."""
    folder = tmp_path / "made"
    small_bundle(folder)
    files, out = {"data/0/a": folder / "a"}, tmp_path / "out.tar"
    write_bundle(out, with_digests(manifest_of({"run_name": "x"}, []), files), files)
    unpack(out, tmp_path / "there", 5)
    config = trial._one_step(tmp_path / "there", tmp_path)
    assert config["cluster"] == {"name": "local", "container": "none"} and config["keep_best"] == {"metric": None}
    assert config["run_name"] == "x" and config["max_steps"] == 1


def test_names_in_an_archive_do_not_reach_the_terminal_as_control_characters(tmp_path: Path) -> None:
    folder, out = tmp_path / "made", tmp_path / "out.tar"
    small_bundle(folder)
    files = {"data/0/a": folder / "a"}
    manifest = msgspec.structs.replace(manifest_of({}, []), versions={"to\x1b[31mch": "1\x07"})
    write_bundle(out, with_digests(manifest, files), files)
    done = command("--unpack", out, "--to", tmp_path / "there", at=tmp_path)
    assert done.returncode == ExitCode.DONE and "made with to?[31mch 1?, here is none" in done.stdout
    manifest = msgspec.structs.replace(manifest, paths=[["a\x1b]0;b"]])
    out.unlink()
    write_bundle(out, with_digests(manifest, files), files)
    done = command("--check", out, at=tmp_path)
    assert done.returncode == ExitCode.BAD_INPUT and "has no path at a?]0;b" in done.stderr


def test_compiled_code_reaches_the_place_where_ranks_look_only_if_asked(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "first"))
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    compiled = Path(cache_folders({"TMPDIR": str(tmp_path / "first")})["TRITON_CACHE_DIR"])
    (compiled / "kernel.cubin").write_bytes(b"code")
    (compiled / "lock").touch()
    group = {"child_paths": {"kernel.cubin": str(compiled / "kernel.cubin"), "bad": "/etc/passwd"}}
    (compiled / "__grp__kernel.json").write_text(json.dumps(group))
    other = compiled.parents[1] / "aarch64-000000000000" / "triton"
    other.mkdir(parents=True)
    (other / "kernel.cubin").write_bytes(b"of another machine")
    done = command(*PLAIN, "--out", tmp_path / "warm.tar", at=project)
    assert done.returncode == ExitCode.DONE and "caches  3 files" in done.stdout, done.stderr
    monkeypatch.setenv("TMPDIR", str(tmp_path / "second"))
    there = Path(cache_folders({"TMPDIR": str(tmp_path / "second")})["TRITON_CACHE_DIR"])
    for words, files in (((), []), (("--warm",), ["__grp__kernel.json", "kernel.cubin"])):
        done = command("--unpack", tmp_path / "warm.tar", "--to", tmp_path / "there", *words, at=tmp_path)
        assert done.returncode == ExitCode.DONE, done.stderr
        assert sorted(path.name for path in there.iterdir()) == files
    assert (there / "kernel.cubin").read_bytes() == b"code" and "2 new files" in done.stdout
    moved = json.loads((there / "__grp__kernel.json").read_text())["child_paths"]
    assert moved == {"kernel.cubin": str(there / "kernel.cubin"), "bad": str(there / "passwd")}
    assert len(list(there.parents[1].iterdir())) == 1
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    done = command("--unpack", tmp_path / "warm.tar", "--to", tmp_path / "there", "--warm", at=tmp_path)
    assert done.returncode == ExitCode.DONE and "note: no compiled code copied: " in done.stdout
    monkeypatch.setenv("TMPDIR", str(tmp_path / "second"))
    (there / "kernel.cubin").write_bytes(b"newer")
    done = command("--unpack", tmp_path / "warm.tar", "--to", tmp_path / "there", "--warm", at=tmp_path)
    assert "0 new files" in done.stdout and (there / "kernel.cubin").read_bytes() == b"newer"


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an image and rows that name it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows" / "images").mkdir(parents=True)
    Image.new("RGB", (56, 56)).save(tmp_path / "rows" / "images" / "a.png")
    yield tmp_path


def test_images_of_rows_keep_their_places_beside_the_rows(seen: Path) -> None:
    words = ["model.tiny.architecture=qwen2_5_vl", "data.train=rows/see.jsonl", "reward.default.name=math", *SHORT]
    row = {"prompt": "<image>what?", "answer": "1", "images": ["images/a.png"]}
    (seen / "rows" / "see.jsonl").write_text(json.dumps(row))
    found = collect(words, None, None, None)
    assert sorted(found.files) == ["data/0/images/a.png", "data/0/see.jsonl"] and found.notes == []
    (seen / "rows" / "see.jsonl").write_text(json.dumps(row | {"images": [str(seen / "rows" / "images" / "a.png")]}))
    with pytest.raises(ValueError, match=r"see.jsonl:1: the image .*a.png is given by its full path"):
        collect(words, None, None, None)


def test_sources_of_every_form_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = json.dumps({"prompt": "say 1", "answer": "1", "question": "1 + 1", "data_source": "x"}) + "\n"
    cached = "datasets--org--set/snapshots/0123456789abcdef0123456789abcdef01234567"
    (tmp_path / "datasets--org--set" / "refs").mkdir(parents=True)
    (tmp_path / "datasets--org--set" / "refs" / "main").write_text(cached[-40:])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    names = ("folder/shard-00.jsonl", "folder/shard-01.jsonl", "one.jsonl", "gsm8k.jsonl")
    for name in (*names, f"{cached}/de/a.jsonl", f"{cached}/en/a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(line.replace('"1", "q', '"#### 1", "q') if "gsm" in name else line)
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "rubric.txt").write_text("Is it right?")
    sources = "[folder,{path:one.jsonl,domain:b},'task:sort_digits','org/set/*/a.jsonl']"
    words = ["model=tiny", f"data.train={sources}", "data.val=[{path:'benchmark:gsm8k',options:{file:gsm8k.jsonl}}]"]
    words += ["reward.default.name=math", "reward.b.name=judge", "reward.b.options.rubric_file=prompts/rubric.txt"]
    words += ["reward.b.options.judges={j: {url: 'http://127.0.0.1:9/v1', model: m}}", *SHORT]
    found = collect(words, None, None, None)
    assert found.config["data"]["train"][0] == "data/0"
    assert found.config["data"]["train"][1]["path"] == "data/1/one.jsonl"
    assert found.config["data"]["train"][2:] == ["task:sort_digits", "data/2/*/a.jsonl"]
    assert found.config["data"]["val"][0]["options"]["file"] == "data/1/gsm8k.jsonl"
    assert found.config["reward"]["b"]["options"]["rubric_file"] == "files/0/rubric.txt"
    out = tmp_path / "out.tar"
    write_bundle(out, with_digests(found.manifest(), found.files), found.files)
    unpack(out, tmp_path / "there", 5)
    for folder in ("folder", "datasets--org--set"):
        shutil.rmtree(tmp_path / folder)
    for name in ("one.jsonl", "gsm8k.jsonl"):
        (tmp_path / name).unlink()
    prepare(["--config", str(tmp_path / "there" / "config.yaml"), "dry_run=true"])


def test_bad_words_are_told_in_one_line(project: Path, archive: Path, tmp_path: Path) -> None:
    def told(*words: str | Path) -> str:
        done = command(*words, at=project)
        assert done.returncode == ExitCode.BAD_INPUT and done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    assert "one of the arguments --out --unpack --check is required" in told("model=tiny")
    assert "--warm: it goes with --unpack" in told("--check", archive, "--warm")
    assert "--config: it goes with --out" in told("--check", archive, "--config", "x.yaml")
    assert "--to here: model is unpacked already" in told("--check", "model", "--start", "--to", "here")
    assert "--to /proc/x: /proc/.x.lock cannot be made: " in told("--unpack", archive, "--to", "/proc/x")
    assert "WORD: it goes with --out" in told("--check", archive, "model=tiny")
    assert "--to: the folder is missing" in told("--unpack", archive)
    assert "--to absent: no such folder" in told("--check", archive, "--start", "--to", "absent")
    assert "a name that ends in .tar or .tar.zst" in told("--out", tmp_path / "out.zip", *PLAIN)
    assert "no folder" in told("--out", tmp_path / "absent" / "out.tar", *PLAIN)
    assert "model.path: no folder absent" in told("--out", tmp_path / "out.tar", *PLAIN, "model.path=absent")
    assert "no files *.whl" in told("--out", tmp_path / "out.tar", *PLAIN, "--wheels", tmp_path)
    weights = told("--out", tmp_path / "out.tar", "model.path=Qwen/Qwen2.5-7B", *SHORT)
    assert "run: " in weights and "prefetch Qwen/Qwen2.5-7B" in weights
    assert "give an archive that hpcrl bundle has made" in told("--check", project / "absent")
    assert "no header of manifest.json" in told("--check", project / "model" / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_not_text_is_told(tmp_path: Path) -> None:
    odd = os.fsdecode(b"data/0/\xff")
    manifest = msgspec.structs.replace(manifest_of({}, []), words=[odd])
    with pytest.raises(ValueError, match="is not UTF-8; rename the file"):
        encoded(manifest)


def test_the_network_is_off_and_loopback_works(tmp_path: Path) -> None:
    code = (
        "import socket\n"
        "with socket.create_server(('127.0.0.1', 0)) as s: socket.create_connection(s.getsockname(), 5).close()\n"
        "try: socket.create_connection(('192.0.2.1', 9), 5)\n"
        "except OSError as error: print(error.errno)\n"
    )
    words = [sys.executable, "-m", "hpcrl.launch.bundle.offline", tmp_path / "told", sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    if (tmp_path / "told").read_text() != OFF:
        pytest.skip("no network namespace is permitted here")
    assert done.stdout == f"{errno.ENETUNREACH}\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_start_from_an_archive_needs_neither_network_nor_sources(project: Path, tmp_path: Path) -> None:
    from hpcrl.config.model import TinyModel
    from hpcrl.engines.tiny import make_tiny_model

    here = tmp_path / "project"
    shutil.copytree(project, here)
    for name in ("model", "reference"):
        shutil.rmtree(here / name)
        (here / name).mkdir()
        make_tiny_model(TinyModel(), here / name)
    (here / "code" / "bundled_helper.py").write_text("NEEDS_NO_NETWORK = True\n")
    small = ("rollout.num_prompts=2", "rollout.group_size=2", "rollout.max_new_tokens=8", "max_steps=9")
    done = command(*WORDS, *small, "--no-caches", "--out", tmp_path / "out.tar.zst", at=here)
    assert done.returncode == ExitCode.DONE, done.stderr
    here.rename(tmp_path / "hidden")
    done = command("--check", tmp_path / "out.tar.zst", "--start", "--to", tmp_path, "--wait-s", "240", at=tmp_path)
    if done.returncode and OFF not in done.stdout:
        pytest.skip("no network namespace is permitted here")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert done.stdout.splitlines()[1:] == [
        OFF,
        "start: all checks and one step ended with exit code 0",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hidden", "out.tar.zst"]
