"""Faults of each kind, which the rehearsal must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.comm.transfer import TransferGroup
from hpcrl.engines.gen.generation_engine import Request, SamplingParams
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.gen.native.paged_attention import DecodeAttention
from hpcrl.engines.train import offloading
from hpcrl.engines.train.fsdp2.logits import Head, token_logprobs
from hpcrl.messaging.messages import Move
from hpcrl.metrics.stats import stat
from tests.engines.worlds import make_model_folder
from tests.gpu_rehearsal.device import CUDA, gpu
from tests.gpu_rehearsal.ledger import Ledger
from tests.gpu_rehearsal.streams import ReusedEarly, Transfers


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with gpu() as ledger, ledger.section("test"):
        yield ledger


def counted(ledger: Ledger) -> dict[str, int]:
    """By what was noted."""
    found: dict[str, int] = {}
    for (_, what), times in ledger.sections["test"].items():
        found[what] = found.get(what, 0) + times
    return found


MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": lambda x, host: x + host,
    "out": lambda x, host: torch.add(x, x, out=host),
    "in place": lambda x, host: host.add_(x),
    "gather": lambda x, host: x[None].gather(1, host.long()[None]),
    "concatenation": lambda x, host: torch.cat([x, host]),
    "product": lambda x, host: torch.mm(x[None], host[:, None]),
    "loss": lambda x, host: torch.where(host > 0, x, 0.0),
    "group of tensors": lambda x, host: torch._foreach_mul_([x, host], 2.0),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_host_tensor_in_an_operation_of_the_device(name: str, ledger: Ledger) -> None:
    with pytest.raises(RuntimeError, match=r"same device, but found at least two devices, cuda:0 and cpu"):
        MIXED[name](torch.ones(3, device="cuda"), torch.ones(3))


def test_a_number_of_the_host_may_meet_the_device(ledger: Ledger) -> None:
    x = torch.ones(3, device="cuda") * torch.tensor(2.0)
    assert x.device == CUDA and x.is_cuda and not counted(ledger)


READING: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "detached": lambda x: x.detach().numpy(),
    "array": np.asarray,
    "view of a result": lambda x: (x * 2).view(-1).numpy(),
}


@pytest.mark.parametrize("name", READING)
def test_numbers_of_the_device_read_as_if_they_were_on_the_host(name: str, ledger: Ledger) -> None:
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        READING[name](torch.ones(3, device="cuda"))


def test_what_is_on_the_device_cannot_be_pinned(ledger: Ledger) -> None:
    with pytest.raises(RuntimeError, match="cannot pin"):
        torch.ones(3, device="cuda").pin_memory()


@pytest.mark.parametrize("layers", [2, 4])
def test_a_wait_in_a_loop_over_layers_grows_with_it(layers: int, ledger: Ledger) -> None:
    """Of hpcrl's function that reads three numbers."""
    x = torch.arange(4.0, device="cuda")
    for _ in range(layers):
        stat(x)
    assert ledger.sections["test"] == {("metrics/stats.py:stat", "item"): 3 * layers}


@pytest.mark.parametrize("layers", [2, 4])
def test_a_wait_in_each_layer_of_the_generator_grows_with_it(
    layers: int, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = DecodeAttention.attend

    def waiting(self: DecodeAttention, q: Tensor, *others: Any) -> Tensor:
        assert float(q.sum()) != 0
        return attend(self, q, *others)

    monkeypatch.setattr(DecodeAttention, "attend", waiting)
    folder = make_model_folder("qwen2", tmp_path / "model", num_hidden_layers=layers)
    engine = NativeEngine(folder, max_num_seqs=1, max_length=16, dtype=torch.float32, device="cuda")
    engine.add([Request(0, [1, 2, 3], SamplingParams(3, ignore_eos=True), seed=0)])
    engine.step(3)
    by_place = ledger.sections["test"]
    assert [times for (_, what), times in by_place.items() if what == "item"] == [3 * layers]


def _noted(function: Callable[[Tensor], Any]) -> Callable[[], Any]:
    """The function as a function of hpcrl."""
    code = compile("def register(tensor): return function(tensor)", offloading.__file__, "exec")
    names: dict[str, Any] = {"function": function}
    exec(code, names)
    return lambda: names["register"](torch.arange(4.0, device="cuda"))


WAITS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), "item"),
    "float": (lambda x: float(x[1]), "item"),
    "bool": (lambda x: bool(x.any()), "item"),
    "if": (lambda x: 1 if x[0] > 0 else 2, "item"),
    "tolist": (lambda x: x.tolist(), "tolist"),
    "cpu": (lambda x: x.cpu(), "to host"),
    "to": (lambda x: x.to("cpu", torch.float64), "to host"),
    "copy_": (lambda x: torch.empty(4).copy_(x), "to host"),
    "copy_ that cannot but block": (lambda x: torch.empty(4).copy_(x, non_blocking=True), "to host"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "mask": (lambda x: x[x > 1], "index by a mask"),
    "values by a mask": (lambda x: x.index_put_((x > 1,), x[:2].clone()), "index by a mask"),
    "masked_select": (lambda x: x.masked_select(x > 1), "masked_select"),
    "unique": (lambda x: x.unique(), "unique"),
    "bincount": (lambda x: x.long().bincount(), "bincount"),
    "repeats": (lambda x: x.repeat_interleave(x.long()), "repeat_interleave"),
    "equal": (lambda x: torch.equal(x, x), "equal"),
    "allclose": (lambda x: torch.allclose(x, x), "allclose"),
    "upload": (lambda x: torch.zeros(4).to(x.device), "to device"),
    "upload that cannot but block": (
        lambda x: torch.zeros(4).to(x.device, non_blocking=True),
        "to device from pageable memory",
    ),
    "new tensor": (lambda x: torch.tensor([1.0, 2.0], device=x.device), "to device"),
    "indices of the host": (lambda x: x[torch.tensor([1, 2])], "to device"),
    "synchronize": (lambda x: torch.cuda.synchronize(), "synchronize"),
    "stream": (lambda x: torch.cuda.current_stream().synchronize(), "synchronize"),
}


@pytest.mark.parametrize("name", WAITS)
def test_each_way_to_wait_is_counted_once(name: str, ledger: Ledger) -> None:
    function, what = WAITS[name]
    _noted(function)()
    assert ledger.sections["test"] == {("engines/train/offloading.py:register", what): 1}


NO_WAITS: dict[str, Callable[[Tensor], Any]] = {
    "kernels": lambda x: (x * 2 + 1).softmax(0).cumsum(0).sort().values,
    "shapes": lambda x: x.view(2, 2).numel() + len(x) + x.dim(),
    "one number by a mask": lambda x: x.__setitem__(x > 1, 0.0),
    "masked_fill": lambda x: x.masked_fill_(x > 1, 0.0),
    "indices": lambda x: x[x.long()],
    "known repeats": lambda x: x.repeat_interleave(x.long(), output_size=6),
    "new memory": lambda x: torch.zeros(4, device=x.device) + x.new_ones(4) + torch.full((4,), 2.0, device="cuda"),
    "pinned upload": lambda x: torch.zeros(4).pin_memory().to(x.device, non_blocking=True),
    "pinned download": lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
    "asked for": lambda x: x.to("cpu", non_blocking=True),
}


@pytest.mark.parametrize("name", NO_WAITS)
def test_what_does_not_wait_is_not_counted(name: str, ledger: Ledger) -> None:
    _noted(NO_WAITS[name])()
    assert not counted(ledger)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str)
def test_a_copy_to_the_host_is_there_after_a_wait_only(dtype: torch.dtype, ledger: Ledger) -> None:
    x = torch.tensor([1, 0, 1], device="cuda").to(dtype)
    place = torch.empty(3, dtype=dtype, pin_memory=True)
    place.copy_(x, non_blocking=True)
    x.zero_()  # on the device, after the copy
    assert place.tolist() != [1, 0, 1]
    event = torch.cuda.Event()
    event.record()
    later = x.to("cpu", non_blocking=True)
    event.synchronize()
    assert place.tolist() == [1, 0, 1] and later.tolist() != [0, 0, 0]
    torch.cuda.synchronize()
    assert later.tolist() == [0, 0, 0]


@pytest.mark.parametrize("way", ["item", "copy", "query", "end"])
def test_everything_that_waits_ends_what_was_started(way: str) -> None:
    with gpu():
        place = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
        assert place.isnan().all()
        event = torch.cuda.current_stream().record_event()
        if way == "item":
            torch.zeros(1, device="cuda").item()
        elif way == "copy":
            torch.zeros(1).to("cuda")
        elif way == "query":
            assert event.query()
        if way != "end":
            assert place.tolist() == [1, 1, 1]
    assert place.tolist() == [1, 1, 1]


def test_the_source_of_a_copy_that_is_written_before_it_ended(ledger: Ledger) -> None:
    source = torch.ones(3, pin_memory=True)
    source.to("cuda", non_blocking=True)
    source[1] = 5
    with pytest.raises(ReusedEarly, match="the source of a copy to the device was written before the host waited"):
        torch.cuda.synchronize()


def test_the_place_of_a_copy_that_is_written_before_it_ended(ledger: Ledger) -> None:
    place = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
    place.zero_()
    with pytest.raises(ReusedEarly, match="the place of a copy to the host was written"):
        torch.cuda.current_stream().synchronize()


def test_memory_that_is_written_after_a_wait_may_be(ledger: Ledger) -> None:
    source = torch.ones(3, pin_memory=True)
    on_device = source.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    source.zero_()
    torch.cuda.synchronize()
    assert on_device.tolist() == [1, 1, 1]


class Mailbox:
    """A group over gloo in one thread: what is sent is received later."""

    class Done:
        def wait(self, *timeout: Any) -> bool:
            return True

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def send(self, tensors: list[Tensor], dest: int, tag: int) -> Done:
        self.sent.append(tensors[0].clone())
        return self.Done()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Done:
        tensors[0].copy_(self.sent.pop(0))
        return self.Done()


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
def test_a_transfer_is_there_after_its_wait_only(batched: bool, ledger: Ledger) -> None:
    group = Transfers(Mailbox())
    x, y = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    if batched:
        group._start_coalescing()
    works = [group.send([x], 1, 0), group.recv([y], 1, 0)]
    if batched:
        works = [group._end_coalescing()]
    assert y.cpu().isnan().all()
    for work in works:
        work.wait()
    assert y.tolist() == [1, 1, 1]


def test_a_buffer_that_is_written_before_it_was_sent(ledger: Ledger) -> None:
    group, buffer = Transfers(Mailbox()), torch.ones(3, device="cuda")
    work = group.send([buffer], 1, 0)
    buffer.mul_(2)
    with pytest.raises(ReusedEarly, match="what was sent was written"):
        work.wait()


def test_nccl_takes_no_host_tensors(ledger: Ledger) -> None:
    group = Transfers(Mailbox())
    for act in (group.send, group.recv):
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            act([torch.ones(3)], 1, 0)


def test_rollouts_travel_over_gloo_between_ranks_with_gpus_too(tmp_path: Any) -> None:
    """From host memory to host memory: on a group over NCCL they could not."""
    moves, fields = [Move(0, 1, [7], [3])], [("token_ids", np.dtype(np.int32))]
    held = {"token_ids": [np.arange(3, dtype=np.int32)]}
    with gpu() as ledger, ledger.section("test"):
        tensor_slice = Mailbox()
        TransferGroup(tensor_slice, (0, 1)).exchange(0, moves, fields, [], lambda _: held)
        ((_, got),) = TransferGroup(tensor_slice, (0, 1)).exchange(1, moves, fields, [], lambda _: held)
        assert got["token_ids"].tolist() == [0, 1, 2] and not counted(ledger)
        with pytest.raises(RuntimeError, match="device type cpu"):
            TransferGroup(Transfers(tensor_slice), (0, 1)).exchange(0, moves, fields, [], lambda _: held)


def test_a_head_of_the_wrong_device_shows(ledger: Ledger) -> None:
    """Of the chunked head, whose matrix is left on the host."""
    hidden, weight = torch.ones(4, 8, device="cuda"), torch.ones(5, 8)
    about: dict[str, Any] = {"head": Head(), "temperature": 1.0, "chunk_tokens": 2, "entropy": False}
    with pytest.raises(RuntimeError, match="same device"):
        token_logprobs(hidden, weight, None, torch.zeros(4, dtype=torch.int64, device="cuda"), **about)


def test_everything_is_as_before_afterwards() -> None:
    with gpu():
        pass
    assert not torch.cuda.is_available() and not torch.ones(2).is_cuda
    with torch.inference_mode():
        assert torch.is_inference(torch.ones(2))
    assert not dist.is_initialized() and torch.Generator("cpu").device.type == "cpu"
