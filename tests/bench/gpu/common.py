"""What the parts of the check share: the row of a table, sizes, models with random weights, the clock of a device."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.models.families import read_shape
from hpcrl.models.shape import ModelShape
from hpcrl.node.gpus import CPU, GpuNeeds, unusable
from hpcrl.system.files import write_durably

MODEL = Path(__file__).parents[3] / "conf/model/Qwen/Qwen2.5-7B/config.json"
SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
SMALL |= {"bos_token_id": 0, "eos_token_id": 0}
FEW_LAYERS = 2
STD = 0.02
GB = 1e9
ROW = "ROW "


@dataclass(frozen=True)
class Row:
    """A line of the table. limit: what the hardware or the plan allows, in the same unit. verdict: ok or bad where the
    check judges, not installed or not run with the reason in `note`, failed with the error; empty: a figure only."""

    part: str
    what: str = ""
    value: float | None = None
    unit: str = ""
    limit: float | None = None
    verdict: str = ""
    note: str = ""

    @property
    def share(self) -> float | None:
        """Value over limit."""
        return self.value / self.limit if self.value is not None and self.limit else None

    def say(self) -> None:
        """Print it for the process that reads rows_in()."""
        print(f"\n{ROW}{json.dumps(dataclasses.asdict(self))}", flush=True)


def no_gpu() -> str:
    """Why torch finds no GPU here, with the way out if it is known."""
    why = unusable(GpuNeeds(1, required=True), os.environ).removesuffix(f", {CPU}")  # a run's key
    return f"this node {why}" if why else f"torch {torch.__version__} finds no GPU"


def rows_in(text: str) -> Iterator[Row]:
    """The rows that were printed, among other lines."""
    lines = (line for line in text.splitlines() if line.startswith(ROW))
    return (Row(**json.loads(line.removeprefix(ROW))) for line in lines)


@dataclass(frozen=True)
class Check:
    """One run of the check. facts: what the part `device` measured, by name. scratch: a folder that the parts share."""

    device: str
    tiny: bool
    scratch: Path
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def pick(self, full: int, tiny: int) -> int:
        """A size: of the check, or of its trial on a CPU."""
        return tiny if self.tiny else full

    def model(self, few_layers: bool) -> tuple[dict[str, Any], ModelShape]:
        """config.json of Qwen2.5-7B, all layers or a few, and its shapes; tiny: of a model that a CPU runs at once."""
        words = json.loads(MODEL.read_text()) | ({"num_hidden_layers": FEW_LAYERS} if few_layers else {})
        words |= SMALL if self.tiny else {}
        return words, read_shape(words)

    def empty_folder(self, few_layers: bool) -> Path:
        """A folder with only config.json, written once."""
        folder = self.scratch / f"config_{'few' if few_layers else 'all'}"
        folder.mkdir(exist_ok=True)
        if not (folder / "config.json").exists():  # another process may be reading it
            write_durably(folder / "config.json", json.dumps(self.model(few_layers)[0]).encode())
        return folder

    def folder(self) -> Path:
        """The model of a few layers with random weights in bf16, written once."""
        from safetensors.torch import save_file

        folder = self.empty_folder(few_layers=True)
        if not (folder / "model.safetensors").exists():
            weights = dict(random_weights(self.model(few_layers=True)[1], self.device))
            save_file({name: tensor.cpu() for name, tensor in weights.items()}, folder / "partial")
            (folder / "partial").rename(folder / "model.safetensors")
        return folder

    def seconds(self, work: Callable[[], object]) -> float:
        """Of work(), with what it has started on the device."""
        self.wait()
        start = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def used(self) -> int:
        """Bytes of the device that are not free, with those of other processes; 0 on a CPU."""
        if not self.on_gpu:
            return 0
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A default process group of this process alone."""
        store, kinds = dist.HashStore(), "cpu:gloo,cuda:nccl" if self.on_gpu else "gloo"
        dist.init_process_group(kinds, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
        try:
            yield
        finally:
            dist.destroy_process_group()


def end_after(work: Callable[[], object]) -> NoReturn:
    """Do the work of this process, then end it with code 0, or 1 after an error: vLLM's engine does not come down by
    itself."""
    code = 1
    try:
        work()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def random_weights(shape: ModelShape, device: str) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by its HF name, bf16: norms 1, all others normal."""
    generator = torch.Generator(device).manual_seed(0)
    for parameter in shape.parameters:
        tensor = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        if parameter.name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(std=STD, generator=generator)
        yield parameter.name, tensor


def num_bytes(shape: ModelShape) -> int:
    """Of all weights in bf16."""
    return 2 * shape.num_parameters


def median(results: Sequence[float]) -> float:
    """The middle one; of an even number, the larger."""
    return sorted(results)[len(results) // 2]
