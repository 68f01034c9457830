"""What a conversion reads and refuses, its resume after a kill, and a full disk; needs no Megatron."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from hpcrl.checkpoint.commit import Facts, begin, commit, seal_files
from hpcrl.checkpoint.shards import STORAGES, ShardedCheckpoint
from hpcrl.convert import streaming
from hpcrl.convert.__main__ import main
from hpcrl.convert.checkpoints import find
from hpcrl.convert.outputs import hf_files, output_dtypes
from hpcrl.convert.sources import opened
from hpcrl.convert.streaming import Progression
from hpcrl.engines.tiny import make_tokenizer
from hpcrl.engines.train.dcp import frame
from hpcrl.engines.train.megatron.names import shard, table
from hpcrl.engines.train.megatron.stored import MegatronWeights
from tests.disks import small_file_system

CONF = Path(__file__).parents[2] / "conf" / "model" / "Qwen"
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": False,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
}


def make_model(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """A model folder with random weights under its names; without transformers, which takes seconds."""
    config = CONFIG | changes
    generator = torch.Generator().manual_seed(3)
    shapes = table(config).shapes
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer(259).save(str(folder / "tokenizer.json"))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def run(*words: Any) -> int:
    return main([str(word) for word in words])


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    assert run("--to", "megatron", "--checkpoint", tmp_path / "model", "--output", tmp_path / "dist") == 0
    return tmp_path / "dist"


class Evil:
    def __init__(self, call: Any, *arguments: Any):
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize("call", [os.system, eval, print, getattr])
def test_a_metadata_pickle_that_runs_code_is_refused(
    megatron: Path, call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "ran"
    arguments = {os.system: (f"touch {marker}",), eval: (f"open({str(marker)!r}, 'w')",), getattr: ("", "upper")}
    (megatron / ".metadata").write_bytes(pickle.dumps(Evil(call, *arguments.get(call, ("text",)))))
    capsys.readouterr()
    assert run("--checkpoint", megatron, "--output", tmp_path / "hf") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{megatron}/.metadata is refused: it names " in line and call.__name__ in line
    assert not marker.exists() and not (tmp_path / "hf").exists()


def test_a_shard_that_runs_code_is_refused(megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import zipfile

    marker = tmp_path / "ran"
    checkpoint = opened(megatron, CONFIG, megatron)._checkpoint  # type: ignore[attr-defined]
    chunk = checkpoint.tensors["decoder.final_layernorm.weight"].chunks[0]
    with zipfile.ZipFile(tmp_path / "evil", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Evil(os.system, f"touch {marker}"), protocol=2))
    content = (tmp_path / "evil").read_bytes()
    content = b"\0" * (chunk.length - len(content)) + content
    with open(megatron / chunk.file, "r+b") as file:
        file.seek(chunk.offset)
        file.write(content)
    assert run("--checkpoint", megatron, "--output", tmp_path / "hf") == 2
    assert "it names" in capsys.readouterr().err and not marker.exists()


@pytest.mark.parametrize("stored", ["stacked", "transposed"])
def test_chunks_written_by_other_programs_are_read(stored: str, tmp_path: Path) -> None:
    """Experts in one chunk, as the grouped layers of older versions store them; columns first."""
    import torch.distributed.checkpoint as dcp

    tensors = make_model(tmp_path / "model")
    state: dict[str, Tensor] = {}
    for entry in table(CONFIG).entries:
        whole = shard(entry, tensors)
        if entry.expert is not None:
            key = entry.name.replace(f"local_experts.{entry.expert}.", "experts.")
            state[key] = torch.stack([state[key], whole]) if key in state else whole
        else:
            state[entry.name] = whole.t().contiguous().t() if stored == "transposed" and whole.dim() == 2 else whole
    dcp.save(state, checkpoint_id=tmp_path / "dist", no_dist=True)
    words = ("--checkpoint", tmp_path / "dist", "--model", tmp_path / "model", "--output", tmp_path / "hf")
    assert run(*words, "--verify") == 0
    assert same(weights(tmp_path / "hf"), tensors)


def make_run(folder: Path, model: Path) -> dict[str, Tensor]:
    """A run folder with two checkpoints in the layout of the fsdp2 trainer: names and experts as in memory."""
    import torch.distributed.checkpoint as dcp
    import yaml

    tensors = make_model(model)
    names = table(CONFIG, stacked=True)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"path": str(model)}}))
    for step in (1, 2):
        state = {"optimizer.state.hf.model.norm.weight.exp_avg": torch.zeros(16)}
        for name, shape in names.shapes.items():
            value = tensors.get(name)
            if value is None:
                which = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
                prefix = name.rpartition(".")[0]
                experts = [
                    torch.cat([tensors[f"{prefix}.{e}.{w}_proj.weight"] for w in which]) for e in range(shape[0])
                ]
                value = torch.stack(experts)
            state[f"model.hf.{name}"] = value + (step - 2)
        tmp = begin(folder / "checkpoints", step, 1)
        dcp.save(state, checkpoint_id=tmp, no_dist=True)
        entries = seal_files(tmp, [path.name for path in tmp.iterdir()])
        commit(folder / "checkpoints", step, tmp, entries, Facts(attempt=1, world={}), keep=2)
    return tensors


def test_the_newest_valid_checkpoint_of_a_run_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = make_run(tmp_path / "run", tmp_path / "model")
    assert run("--checkpoint", tmp_path / "run", "--output", tmp_path / "new") == 0
    assert same(weights(tmp_path / "new"), tensors)
    first = tmp_path / "run" / "checkpoints" / "step_000001"
    assert run("--checkpoint", first, "--output", tmp_path / "old") == 0
    assert same(weights(tmp_path / "old"), {name: tensor - 1 for name, tensor in tensors.items()})

    second = first.with_name("step_000002")
    file = next(second.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert run("--checkpoint", tmp_path / "run", "--output", tmp_path / "before") == 0
    assert "skipping step_000002: " in capsys.readouterr().err
    assert same(weights(tmp_path / "before"), weights(tmp_path / "old"))
    assert run("--checkpoint", second, "--output", tmp_path / "no") == 2
    assert f"{second} is damaged: {file.name} is not what was committed" in capsys.readouterr().err
    assert run("--checkpoint", tmp_path / "run" / "checkpoints", "--output", tmp_path / "no") == 2
    assert "has several checkpoints; name the run folder" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_critic_is_not_converted_to_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Except for its head, its weights look like a language model with tied embedding."""
    make_model(tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(file)
    save_file(tensors | {"score.weight": torch.ones(1, tensors["model.norm.weight"].numel())}, file)
    assert run("--to", "megatron", "--checkpoint", tmp_path / "model", "--output", tmp_path / "no") == 2
    assert "is a critic or a reward model, whose head (score.weight) would be lost" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_folder_without_a_checkpoint_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "old" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "latest_checkpointed_iteration.txt").write_text("12\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    small = ("--to", "megatron", "--checkpoint", tmp_path / "model")
    for words, text in (
        (("--checkpoint", tmp_path / "none"), f"--checkpoint {tmp_path}/none is not a folder"),
        (("--checkpoint", tmp_path / "empty"), "empty is not a checkpoint: no .metadata in it or below it"),
        (("--checkpoint", tmp_path / "model"), "is a model in HF layout already, without quantised weights; --to meg"),
        (("--checkpoint", tmp_path / "old"), "is Megatron's old format; save it as torch_dist"),
        (("--checkpoint", tmp_path / "top"), "names '12', but there is no folder"),
        (("--to", "megatron", "--checkpoint", tmp_path / "empty"), "empty/config.json cannot be read"),
        ((*small, "--output", tmp_path / "full"), f"--output {tmp_path}/full exists, and nothing is overwritten"),
        ((*small, "--shard-gb", 0), "--shard-gb 0.0: a number above 0 and below 1e9 is needed"),
        ((*small, "--dtype", "int3"), "argument --dtype: invalid choice: 'int3'"),
    ):
        capsys.readouterr()
        assert run(*(() if "--output" in words else ("--output", tmp_path / "hf")), *words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert text in line, line
    assert not (tmp_path / "hf").exists()


@pytest.mark.slow
def test_a_killed_conversion_resumes(megatron: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--checkpoint", str(megatron), "--output", str(tmp_path / "hf"), "--shard-gb", "2e-6", "--threads", "1"]
    program = f"""
import os, signal
from hpcrl.checkpoint.shards import STORAGES, ShardedCheckpoint
from hpcrl.convert import streaming
from hpcrl.convert.__main__ import main
renamed = []
def rename(*paths):
    renamed.append(paths)
    if len(renamed) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    os.replace(*paths)
streaming.os.rename = rename
main({words!r})
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL and not (tmp_path / "hf").exists()
    partial = tmp_path / ".hf.converting"
    done = {path.name: path.stat().st_ino for path in partial.glob("*.safetensors")}
    assert len(done) == 2 and len(list(partial.glob("*.part"))) == 1
    assert main(words) == 0 and not partial.exists()
    assert {name: (tmp_path / "hf" / name).stat().st_ino for name in done} == done, "they were written once"
    assert same(weights(tmp_path / "hf"), weights(tmp_path / "model"))
    assert not list((tmp_path / "hf").glob("*.part"))


def test_several_threads_can_write_one_file(megatron: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part by part; after an error in one of them the file is removed and written again."""
    for name, size in (("BLOCK_BYTES", 512), ("PART_BYTES", 2048), ("SYNC_BYTES", 8192)):
        monkeypatch.setattr(streaming, name, size)
    words = ("--checkpoint", megatron, "--output", tmp_path / "hf", "--threads", 4, "--verify")
    write, count = streaming._write_at, itertools.count()

    def failing(descriptor: int, numbers: bytes | memoryview, offset: int) -> None:
        if next(count) == 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(descriptor, numbers, offset)

    with monkeypatch.context() as broken:
        broken.setattr(streaming, "_write_at", failing)
        assert run(*words) == 18
    assert not list((tmp_path / ".hf.converting").glob("*.part")) and next(count) > 20
    assert run(*words) == 0
    assert same(weights(tmp_path / "hf"), weights(tmp_path / "model"))


def test_a_different_conversion_does_not_reuse_old_files(megatron: Path, tmp_path: Path) -> None:
    """A file of the same name and size from another dtype, or of a checkpoint written anew, is written again."""
    partial = tmp_path / ".hf.converting"
    partial.mkdir()
    for name in ("plan.sha256", "model.safetensors", "stale"):
        (partial / name).write_bytes(b"0" * 64)
    assert run("--checkpoint", megatron, "--output", tmp_path / "hf") == 0
    assert same(weights(tmp_path / "hf"), weights(tmp_path / "model"))
    assert files(tmp_path / "hf") == files(tmp_path / "model")  # neither "stale" nor keys found only in the checkpoint


def test_two_conversions_cannot_write_one_folder(
    megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".hf.converting").mkdir()
    with streaming._alone(tmp_path / ".hf.converting", tmp_path / "hf"):
        assert run("--checkpoint", megatron, "--output", tmp_path / "hf") == 2
    assert "another conversion is writing it" in capsys.readouterr().err


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path / "model", vocab_size=40000)  # 2 x 2.6 MB
    (tmp_path / "disk").mkdir()
    with small_file_system(tmp_path / "disk", 4) as disk:
        words = ("--to", "megatron", "--checkpoint", tmp_path / "model", "--output", disk / "out", "--shard-gb", "3e-3")
        monkeypatch.setattr("hpcrl.system.files.CONTENDED_S", 0.0)
        assert run(*words) == 2
        assert f"--output {disk}/out needs another 0.00518 GB: the file system has 0.00419 GB free" in (
            capsys.readouterr().err
        )
        assert list(disk.iterdir()) == []
        # A disk that fills up later: complete files stay, and the same command resumes.
        monkeypatch.setattr(streaming, "find_room", lambda *args, **more: (1 << 40, ""))
        assert run(*words) == 18
        assert os.strerror(errno.ENOSPC) in (line := capsys.readouterr().err) and ".distcp" in line
        partial = disk / ".out.converting"
        assert not list(partial.glob("*.part")) and not (disk / "out").exists()
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        assert run(*words) == 0
        assert run("--checkpoint", disk / "out", "--output", tmp_path / "hf") == 0
    assert same(weights(tmp_path / "hf"), weights(tmp_path / "model"))


def test_progress_is_a_line_with_rate_and_time_left() -> None:
    import io

    now = [0.0]
    stream = io.StringIO()
    progress = Progression(100_000_000_000, stream, clock=lambda: now[0])
    progress.skip(20_000_000_000)
    for _ in range(10):
        now[0] += 2.5
        progress.add(1_000_000_000)
    assert stream.getvalue().splitlines() == [
        "24 of 100 GB  400 MB/s  ETA 3 min 10 s",
        "28 of 100 GB  400 MB/s  ETA 3 min 00 s",
    ]


def stand_in(folder: Path, config: dict[str, Any]) -> None:
    """A torch_dist folder with the names and shapes of a large model. Chunks of one shape share their bytes, but for
    the first and last expert of the first and last layer, which begin with their layer and expert."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    folder.mkdir()
    tensors: dict[str, TensorStorageMetadata] = {}
    storage, places, end = {}, dict[Any, tuple[int, int]](), 0
    names = table(config, "fused", padded_vocabulary=152064)
    layers, experts = config["num_hidden_layers"], config["num_experts"]
    with open(folder / "__0_0.distcp", "wb") as file:
        for entry in names.entries:
            key, leading, whole = entry.name, [], []
            if entry.layer is not None:
                key = entry.name.replace(f"layers.{entry.layer}.", "layers.")
                leading, whole = [entry.layer], [layers]
            if entry.expert is not None:
                key = key.replace("mlp.experts.", "mlp.experts.experts.").removesuffix(str(entry.expert))
                leading, whole = [*leading, entry.expert], [*whole, experts]
            rows = min(entry.shape[0], 4096)
            for first in range(0, entry.shape[0], rows):
                shape = (*(1 for _ in leading), min(rows, entry.shape[0] - first), *entry.shape[1:])
                marked = entry.layer in (0, layers - 1) and entry.expert in (0, experts - 1)
                place = (shape, (entry.layer, entry.expert, key) if marked else None)
                if place not in places:
                    head, tail = frame(shape, torch.bfloat16)
                    size = len(head) + len(tail) + 2 * torch.Size(shape).numel()
                    mark = torch.tensor([entry.layer or 0, entry.expert or 0], dtype=torch.bfloat16)
                    for at, content in (
                        (end, head),
                        (end + len(head), mark.view(torch.uint8).numpy().tobytes()),
                        (end + size - len(tail), tail),
                    ):
                        file.seek(at)  # between them a sparse file
                        file.write(content)
                    places[place], end = (end, size), end + size
                offsets = torch.Size([*leading, first, *(0 for _ in entry.shape[1:])])
                stored = tensors.setdefault(
                    key, TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([*whole, *entry.shape]), [])
                )
                stored.chunks.append(ChunkStorageMetadata(offsets, torch.Size(shape)))
                storage[MetadataIndex(key, offsets)] = _StorageInfo("__0_0.distcp", *places[place])
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, None, storage)))  # type: ignore[arg-type]


@pytest.mark.slow
def test_qwen3_235b_is_read_under_the_right_names(tmp_path: Path) -> None:
    config = json.loads((CONF / "Qwen3-235B-A22B" / "config.json").read_text())
    stand_in(tmp_path / "dist", config)
    began = time.process_time()
    source = opened(tmp_path / "dist", config, tmp_path)
    assert isinstance(source, MegatronWeights)
    assert len(source.shapes) == 94 * (128 * 3 + 9) + 3
    dtypes = output_dtypes(source, None)
    planned = hf_files(source, dtypes, 4_000_000_000)
    assert len(planned) == 118 and sum(file.size for file in planned) // 10**9 == 470
    for name, shape in source.shapes.items():
        rows = source.read(name, 0, 1)
        assert rows.shape == (1, *shape[1:]) and rows.dtype == torch.bfloat16
        assert source.read(name, shape[0] - 1, shape[0]).shape == rows.shape
    for layer in (0, 93):
        for expert in (0, 127):
            for which in ("gate", "down"):
                row = source.read(f"model.layers.{layer}.mlp.experts.{expert}.{which}_proj.weight", 0, 1)
                assert row[0, :2].tolist() == [layer, expert]
    assert time.process_time() - began < 60


def _edit_header(file: Path, name: str, **changes: Any) -> None:
    """Change an entry of the header of a safetensors file, and nothing else."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    entries[name] |= changes
    text = json.dumps(entries).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("dtype", "model.norm.weight has 64 bytes, which is not BF16 [16]"),
        ("shape", "model.norm.weight has sizes ["),
        ("outside", "it names '../model.safetensors', which is not a file of the folder"),
        ("number", "it names 5, which is not a file of the folder"),
        ("claim", "its header claims 100000001 bytes"),
        ("link", "is a symbolic link; remove it"),
        ("shard", "--shard-gb inf: a number above 0 and below 1e9 is needed"),
        ("config", "config.json"),
    ],
)
def test_a_hostile_model_folder_is_one_line(
    damage: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path / "model")
    file, words = tmp_path / "model" / "model.safetensors", list[str]()
    index = tmp_path / "model" / "model.safetensors.index.json"
    match damage:
        case "dtype":
            _edit_header(file, "model.norm.weight", dtype="BF16")
        case "shape":
            _edit_header(file, "model.norm.weight", shape=[16.0])
        case "outside":
            index.write_text(json.dumps({"weight_map": {"x": "../model.safetensors"}}))
        case "number":
            index.write_text(json.dumps({"weight_map": {"x": 5}}))
        case "claim":
            file.write_bytes((100_000_001).to_bytes(8, "little"))
            os.truncate(file, 100_000_200)
        case "link":
            (tmp_path / "victim").mkdir()
            (tmp_path / "victim" / "precious.txt").write_text("kept")
            (tmp_path / ".dist.converting").symlink_to("victim")
        case "shard":
            words = ["--shard-gb", "inf"]
        case "config":
            config = json.loads((tmp_path / "model" / "config.json").read_text())
            (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": None}))
    assert run("--to", "megatron", "--checkpoint", tmp_path / "model", "--output", tmp_path / "dist", *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line, line
    assert not (tmp_path / "dist").exists()
    assert damage != "link" or (tmp_path / "victim" / "precious.txt").read_text() == "kept"


def test_an_invalid_config_is_named_for_a_trainers_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", tmp_path / "model")
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": None}))
    capsys.readouterr()
    assert run("--checkpoint", tmp_path / "run", "--model", other, "--output", tmp_path / "hf") == 2
    assert "num_hidden_layers" in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "hf").exists()


@pytest.mark.parametrize("dtype", STORAGES.values(), ids=STORAGES)
def test_shards_of_every_type_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = (torch.arange(-6, 6).view(3, 4) % 100).to(dtype)
    dcp.save({"table": tensor}, checkpoint_id=tmp_path, no_dist=True)
    checkpoint = ShardedCheckpoint(tmp_path)
    found = checkpoint.read("table", ((1, 3), (0, 4)))
    checkpoint.close()
    assert found.dtype == dtype and torch.equal(found, tensor[1:3])


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (
            "best",
            "--step best: {root} names no best checkpoint (keep_best.metric); there are checkpoints of steps 10, 20",
        ),
        ("15", "--step 15: {root} has no checkpoint of step 15; there are checkpoints of steps 10, 20"),
        ("newest", "--step newest: expected a step's number or best; there are checkpoints of steps 10, 20"),
        ("10", "--checkpoint {root}/step_000010 is damaged: manifest.json cannot be read"),
    ],
)
def test_a_step_that_cannot_be_read_is_named(tmp_path: Path, step: str, said: str) -> None:
    root = tmp_path / "checkpoints"
    for number in (10, 20):
        (root / f"step_{number:06d}").mkdir(parents=True)
    (root / "step_000010" / "manifest.json").write_text("{}")
    with pytest.raises(ValueError) as error:
        find(tmp_path, None, hashes=False, tell=lambda _: None, step=step)
    assert str(error.value).startswith(said.format(root=root))
    with pytest.raises(ValueError, match="is no run folder with checkpoints"):
        find(root, None, hashes=False, tell=lambda _: None, step=step)


def test_a_best_step_whose_checkpoint_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step_000020").mkdir(parents=True)
    best = {"step": 10, "metric": "val/score/mean", "mode": "max", "value": 0.5}
    (tmp_path / "checkpoints/BEST").write_text(json.dumps(best))
    with pytest.raises(ValueError, match="has no checkpoint of step 10; there are checkpoints of steps 20"):
        find(tmp_path, None, hashes=False, tell=lambda _: None, step="best")
