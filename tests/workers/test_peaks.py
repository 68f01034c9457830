"""Peak memory of each phase: the kernel's figure, and the plan's."""

from __future__ import annotations

import pytest
import torch

from hpcrl.messaging.messages import DecodeChunk, DropSamples, Logprobs, TrainStep, UpdateWeights
from hpcrl.metrics.stats import flatten, merge
from hpcrl.workers.peaks import Peaks, take_peak, trim_heap

MIB = 1 << 20


def test_a_peak_includes_short_lived_memory() -> None:
    trim_heap()  # memory that earlier tests have freed would serve the allocation
    take_peak()
    before = take_peak()
    filled = torch.ones(64 * MIB // 4)
    del filled
    trim_heap()  # glibc keeps the memory if it came from a larger block that earlier tests have freed
    assert 60 * MIB < take_peak() - before < 80 * MIB
    assert abs(take_peak() - before) < 8 * MIB  # the peak is that since the last call


def test_peaks_are_assigned_to_the_phase_of_their_command() -> None:
    peaks = Peaks()
    sizes = {"train": 96, "generate": 32, "publish": 64, "reference": 16}
    commands = {
        "generate": DecodeChunk(1, [], []),
        "train": TrainStep(1, [], 1.0, 1.0),
        "reference": Logprobs(1, "reference", "ref_logprobs", []),
        "publish": UpdateWeights(1, []),
    }
    trim_heap()
    take_peak()
    base = take_peak()
    for phase, command in commands.items():
        peaks.enter(command)
        filled = torch.ones(sizes[phase] * MIB // 4)
        del filled
        peaks.enter(DropSamples([]))  # belongs to no phase
    found = flatten(peaks.take())
    assert found.keys() == {f"system/{phase}/peak_gib" for phase in sizes}
    for phase, size in sizes.items():
        assert found[f"system/{phase}/peak_gib"] * 2**30 - base == pytest.approx(size * MIB, abs=8 * MIB)
    assert flatten(peaks.take()).keys() == {"system/publish/peak_gib"}  # only the phase that goes on


def test_the_largest_peak_counts() -> None:
    peaks = Peaks()
    peaks.enter(TrainStep(1, [], 1.0, 1.0))
    first = peaks.take()
    filled = torch.ones(32 * MIB // 4)
    second = peaks.take()
    del filled
    [(name, value)] = flatten(merge([second, first])).items()
    assert value == second[f"{name}^"].total > first[f"{name}^"].total
