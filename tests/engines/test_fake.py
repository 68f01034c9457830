"""Engines without a model: their times and the distribution of their lengths."""

from __future__ import annotations

import statistics
from types import SimpleNamespace

import pytest
import torch

from hpcrl.engines.gen.fake_generator import engine as fake
from hpcrl.engines.gen.fake_generator.engine import FakeEngine, long_tailed
from hpcrl.engines.gen.generation_engine import Request, SamplingParams


def request(number: int, longest: int = 4096) -> Request:
    return Request(number, [1], SamplingParams(max_new_tokens=longest), seed=number * 7919)


def test_lengths_have_the_configured_median_and_tail() -> None:
    lengths = sorted(map(long_tailed(64, 1.0), map(request, range(4000))))
    assert 60 < statistics.median(lengths) < 68
    assert 0.01 < sum(length > 8 * 64 for length in lengths) / len(lengths) < 0.03
    assert set(map(long_tailed(None, 0.0), map(request, range(10)))) == {4096 // 8}
    assert max(long_tailed(64, 9.0)(request(n, 100)) for n in range(100)) == 100


def test_a_generator_sleeps_per_slot_decode_step_and_weight_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    # The module's own: threads of other tests in this process sleep too.
    monkeypatch.setattr(fake, "time", SimpleNamespace(sleep=slept.append))
    lengths = {0: 2, 1: 2, 2: 5}
    engine = FakeEngine(
        max_num_seqs=2, max_length=64, lengths=lambda r: lengths[r.id], decode_s=1.0, prefill_s=100.0, load_s=7.0
    )
    engine.load_weights([("a", torch.zeros(1))], version=0)
    engine.add([request(number, 8) for number in lengths])
    engine.step(1)
    engine.step(3)
    engine.step(8)  # the last response ends after three of them
    engine.step(8)  # nothing is left
    assert slept == [7.0, 200.0 + 1, 100.0 + 3, 3.0]
