"""make gpu-check at sizes for a CPU: every part that runs in one process, and failing parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from hpcrl.engines.varlen import KERNELS
from tests.bench.gpu import agreement, attention, decoding, device, peers, training
from tests.bench.gpu.__main__ import HERE, PARTS, Part, main, rows_of, table
from tests.bench.gpu.common import Check, Row
from tests.bench.gpu.peers import RANKS, SURVIVED, take_part


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    return Check("cpu", True, tmp_path_factory.mktemp("scratch"), {"copy": 10.0, "product": 0.1})


def test_memory_bandwidth_and_compute_rate_are_measured(check: Check) -> None:
    rows = {row.what: row for row in device.measure(check)}
    assert rows["copy"].value is not None and rows["copy"].value > 0
    assert rows["product"].value is not None and rows["product"].value > 0


def test_attention_is_measured_with_every_kernel(check: Check) -> None:
    blocks, *kernels = attention.measure(check)
    assert blocks.value is not None and blocks.value > 0
    assert {row.what for row in kernels} == set(KERNELS)


def test_agreeing_engines_are_distinguished_from_differing_ones(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(agreement.native(check))
    assert [row.verdict for row in rows] == ["ok", "ok"]
    assert all(row.value is not None and 0 < row.value < 0.01 for row in rows)
    own = agreement.NativeEngine.load_weights

    def wrong(engine: agreement.NativeEngine, named: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        own(engine, ((name, tensor * 3) for name, tensor in named), version)

    monkeypatch.setattr(agreement.NativeEngine, "load_weights", wrong)
    assert [row.verdict for row in agreement.native(check)] == ["bad", "bad"]


def test_a_training_step_and_moving_its_state_are_measured(check: Check) -> None:
    rows = {row.what: row for row in training.measure(check)}
    assert rows["step after it"].verdict == "ok"
    assert {
        "rate, of a product's",
        "planned peak",
        "first offload",
        "offload",
        "onload",
        "weights to the generator",
    } <= rows.keys()


def patient(name: str) -> Part:
    """A part with enough time for a busy CPU."""
    return dataclasses.replace(PARTS[name], limit_s=500.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_log_probs_match_the_trainer_it_gets_weights_from(check: Check) -> None:
    """With a replica of two ranks, each of which does the same as in the part for one rank."""
    if not find_spec("vllm"):
        pytest.skip("vllm is not installed (extra: vllm)")
    name = "vllm TP2"
    rows = list(rows_of(name, patient(name), check, 500.0, 0))
    assert len(rows) == 2, rows
    rate, difference = rows
    assert (rate.part, rate.what, rate.verdict) == (name, "weights to the generator", ""), rate
    assert rate.value is not None and rate.value > 0
    assert (difference.what, difference.verdict) == ("mean difference, fp32 head", "ok")
    assert difference.value is not None and 0 < difference.value < 0.01


def test_single_gpu_parts_fit_in_eight_minutes_and_the_most_common_come_first() -> None:
    assert sum(part.limit_s for part in PARTS.values() if part.num_gpus == 1) <= 470, "and some to start"
    assert [*PARTS][-2:] == ["training deepspeed", "training megatron"]
    compiling = {name for name, part in PARTS.items() if part.cold_s}
    assert compiling == {name for name, part in PARTS.items() if part.module}, "they have time for it"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_a_step_of_other_engines_is_measured(engine: str, check: Check) -> None:
    """In a separate process, as always: both engines keep process-wide state."""
    pytest.importorskip(engine)
    name = f"training {engine}"
    rows = {row.what: row for row in rows_of(name, patient(name), check, 200.0, 0)}
    assert rows.keys() == {"step", "rate, of a product's"}, rows
    assert all(row.part == name and row.value is not None and row.value > 0 for row in rows.values())
    assert rows["rate, of a product's"].limit == check.facts["product"]


def test_rates_count_the_necessary_operations_of_a_step(check: Check) -> None:
    """By hand: 2 layers of width 64, keys of 32, a feed-forward layer of 96, 256 words, 16 tokens a row."""
    shape = check.model(few_layers=True)[1]
    batch = training.make_batch([16] * 4, num_prompt_tokens=1)
    _, rate = training._rates(check, "training", shape, batch, 16, seconds=1.0)
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    assert rate.value == pytest.approx(64 * (6 * (2 * layer + 256 * 64) + 6 * 2 * 16 * 64) / 1e12)


def test_a_generator_is_measured_while_asleep_and_awake(check: Check) -> None:
    rows = list(decoding.native(check))
    assert [row.what for row in rows] == ["2 responses", "4 responses", "load weights", "sleep", "wake and load"]
    assert rows[-1].verdict == "ok"
    assert rows[0].share is not None and 0 < rows[0].share < 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "limit_s", "found", "stack"),
    [
        (
            "raises",
            200.0,
            [("before", "", ""), ("", "failed", "ValueError: facts are {'copy': 10.0, 'product': 0.1}")],
            "in raises\n",
        ),
        ("aborts", 200.0, [("before", "", ""), ("", "failed", "ended by SIGABRT")], "in aborts\n"),
        ("hangs", 2.0, [("", "failed", "no end after 2 s")], ""),
    ],
)
def test_a_failing_part_is_one_line(
    how: str,
    limit_s: float,
    found: list[tuple[str, str, str]],
    stack: str,
    check: Check,
    capsys: pytest.CaptureFixture[str],
) -> None:
    part = Part(f"tests.failing_parts:{how}", limit_s)
    assert [(row.what, row.verdict, row.note) for row in rows_of("bad one", part, check, 200.0, 0)] == found
    assert stack in capsys.readouterr().err


def test_missing_requirements_are_reported(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = dataclasses.replace(check, device="cuda")
    pair = PARTS["lost peer"]
    assert [r.note for r in rows_of("lost peer", pair, on_gpu, 60.0, 1)] == ["needs 2 GPUs, 1 found"]
    assert [r.verdict for r in rows_of("lost peer", pair, check, 0.0, 0)] == ["not run"]
    monkeypatch.setattr(f"{HERE}.__main__.importlib.util.find_spec", lambda name: None)
    for name in ("fsdp2 and vllm", "decode vllm", "training deepspeed", "training megatron"):
        assert [r.verdict for r in rows_of(name, PARTS[name], check, 60.0, 0)] == ["not installed"], name
    found = {"transformer_engine": None}
    monkeypatch.setattr(f"{HERE}.__main__.importlib.util.find_spec", lambda name: found.get(name, name))
    on_gpu = dataclasses.replace(check, device="cuda")
    (row,) = rows_of("training megatron", PARTS["training megatron"], on_gpu, 60.0, 1)
    assert (row.verdict, row.note) == ("not installed", "transformer_engine")


def test_without_a_gpu_the_alternative_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "--device cpu --tiny" in capsys.readouterr().out


def test_the_table_shows_shares_and_reasons() -> None:
    text = table([Row("a", "rate", 1234.5, "GB/s", 2469.0), Row("b", verdict="not run", note="needs 2 GPUs, 1 found")])
    assert text.splitlines()[1].split() == ["a", "rate", "1,234", "GB/s", "2,469", "0.5"]
    assert text.splitlines()[2].split(maxsplit=1) == ["b", text.splitlines()[2].split(maxsplit=1)[1]]
    assert text.endswith("needs 2 GPUs, 1 found")


@pytest.mark.parametrize(("what", "said"), [("update", "GB/s "), ("dies", SURVIVED)])
def test_two_ranks_transfer_weights_and_one_survives_the_other(
    what: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads replace processes."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: take_part(what, "cpu", 1, store, rank), RANKS))
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_creating_a_group_of_two_ranks_is_timed(check: Check) -> None:
    rate, made = peers.update(check)
    assert (rate.unit, made.unit) == ("GB/s", "s") and made.limit == pytest.approx(0.35 + 2 * 0.0144)
    assert rate.value is not None and rate.value > 0 and made.value is not None and 0 < made.value < 20
