"""Weights staged in buckets and broadcast: every bit, shape and dtype, in order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpcrl.comm import weights
from hpcrl.comm.weights import Bucket, receive_buckets, send_buckets, stage
from hpcrl.rollout.store import RolloutReader
from tests.dist.conftest import SIZE, Threads

SHAPES = [(3, 5), (1,), (), (7, 1, 3), (0, 4), (64,), (33, 9), (0,)]
DTYPES = {"float32": torch.int32, "bfloat16": torch.int16}  # and the integers to look at their bits


def make_weights(dtype: str) -> dict[str, torch.Tensor]:
    """Tensors of any bits, NaN included; one is not contiguous and one requires gradients."""
    bits = DTYPES[dtype]
    torch.manual_seed(3)
    made = {
        f"layers.{i}.weight": torch.randint(-(2**15), 2**15, shape).to(bits).view(getattr(torch, dtype))
        for i, shape in enumerate(SHAPES)
    }
    made["transposed"] = made["layers.6.weight"].t()
    made["parameter"] = torch.nn.Parameter(made["layers.5.weight"].clone())
    return made


def assert_same(buckets: list[Bucket], expected: dict[str, torch.Tensor]) -> None:
    got = dict(named for bucket in buckets for named in bucket.tensors())
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert got[name].shape == tensor.shape, name
        assert got[name].dtype == tensor.dtype, name
        bits = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        assert torch.equal(got[name].view(bits), tensor.detach().contiguous().view(bits)), name


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "BUCKET_BYTES", 256)


@pytest.mark.parametrize("dtypes", [["float32"], ["bfloat16"], ["float32", "bfloat16"]], ids="-".join)
def test_what_is_staged_arrives_on_the_other_ranks(threads: Threads, small_buckets: None, dtypes: list[str]) -> None:
    expected = {f"{dtype}.{name}": t for dtype in dtypes for name, t in make_weights(dtype).items()}
    buckets = stage(iter(expected.items()), keep=True)
    assert len(buckets) > 2
    assert_same(buckets, expected)
    name, root = "weights/" + "-".join(dtypes), 1

    def publish(rank: int) -> list[Bucket]:
        group = threads.worlds[rank].group(name, range(SIZE), 0)
        if rank == root:
            send_buckets(group, buckets, root)
            return buckets
        return list(receive_buckets(group, root))

    for received in threads.every(publish):
        assert_same(received, expected)


@pytest.mark.parametrize("expected", [{}, {"none": torch.empty(0, 3)}], ids=["no tensors", "an empty tensor"])
def test_nothing_to_send(threads: Threads, expected: dict[str, torch.Tensor], request: pytest.FixtureRequest) -> None:
    buckets = stage(iter(expected.items()), keep=True)

    def publish(rank: int) -> list[Bucket] | None:
        group = threads.worlds[rank].group(f"weights/{request.node.name}", range(SIZE), 0)
        return send_buckets(group, buckets, 0) if rank == 0 else list(receive_buckets(group, 0))

    for received in threads.every(publish)[1:]:
        assert_same(received, expected)


def test_a_staged_copy_does_not_follow_the_weights() -> None:
    weight = torch.zeros(4)
    buckets = stage(iter({"w": weight}.items()), keep=True)
    weight += 1
    assert_same(buckets, {"w": torch.zeros(4)})


def test_ranks_that_do_not_publish_only_take_part() -> None:
    drawn = []

    def gather():  # a collective on the trainers: every rank must draw all of it
        for name, tensor in make_weights("float32").items():
            drawn.append(name)
            yield name, tensor

    assert stage(gather(), keep=False) == []
    assert len(drawn) == len(SHAPES) + 2


def test_weights_that_reuse_memory_are_copied_as_they_come() -> None:
    memory = torch.empty(4)

    def named():
        for number in (1.0, 2.0):
            yield f"w{number}", memory.fill_(number)

    assert_same(stage(named(), keep=True), {"w1.0": torch.full((4,), 1.0), "w2.0": torch.full((4,), 2.0)})


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks")
@pytest.mark.timeout(240)
def test_a_disaggregated_run_publishes_its_weights_over_nccl(tmp_path: Path) -> None:
    words = [f"run_dir={tmp_path / 'run'}", "layout=disaggregated", "layout.trainer.num_ranks=1", "max_steps=2"]
    words += ["layout.generator.num_ranks=1", "cluster.device=cuda", "rollout.filter_std=false", "eval_every=0"]
    done = subprocess.run(
        [sys.executable, "-m", "hpcrl.launch", "+experiment=demo", *words],
        env={**os.environ, "NCCL_DEBUG": "INFO"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    batch = RolloutReader(tmp_path / "run").batch(2)
    assert batch.old_logprobs is not None
    # The generator has what the trainer has, or its log-probs would not agree.
    assert (batch.old_logprobs - batch.gen_logprobs)[batch.loss_mask].abs().max() < 1e-3
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").rglob("rank_*.log"))
    assert "NCCL INFO" in logs
