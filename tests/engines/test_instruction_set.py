"""The instruction set influences the bits, and make test-avx2 really uses a different one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hpcrl.engines.compiling import VARIABLE, part_by_processor

pytestmark = pytest.mark.numerics

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
PROGRAM = """
import torch
from hpcrl.engines.compiling import VARIABLE, part_by_processor
values = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
print(torch.backends.cpu.get_cpu_capability(), values.softmax(-1).view(torch.int32).sum().item())
part_by_processor(environ := {})
part_by_processor(environ)
print(environ[VARIABLE])
"""


def capability_and_bits(**variables: str) -> list[str]:
    environ = {name: value for name, value in os.environ.items() if name not in AVX2} | variables
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout.split()


def test_tests_run_with_the_requested_instruction_set() -> None:
    asked = os.environ.get("ATEN_CPU_CAPABILITY")
    assert asked is None or torch.backends.cpu.get_cpu_capability() == asked.upper()


@pytest.mark.slow
def test_a_smaller_instruction_set_gives_other_bits() -> None:
    default, fewer = capability_and_bits(), capability_and_bits(**AVX2)
    assert fewer[0] == "AVX2"
    assert (default[0] == "AVX2") == (default[1] == fewer[1]), "where there is AVX2 alone both are the same"


@pytest.mark.slow
def test_each_instruction_set_has_its_own_compilation_folder() -> None:
    default, fewer = capability_and_bits(), capability_and_bits(**AVX2)
    assert (default[0] == fewer[0]) == (default[2] == fewer[2])


def test_a_given_compilation_folder_is_kept() -> None:
    part_by_processor(environ := {VARIABLE: "/given"})
    assert environ == {VARIABLE: "/given"}
