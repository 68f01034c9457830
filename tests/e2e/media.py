"""A generation engine for tests that takes images and writes its inputs: generator.engine=tests.e2e.media:SPEC."""

from __future__ import annotations

from hpcrl.spec.kinds import GenEngineSpec
from hpcrl.spec.media import IMAGE

SPEC = GenEngineSpec(
    about="Generates without a model, and writes the prompt and media of each request of a rank into the run folder.",
    make="tests.e2e.media_engine:make",
    tensor_parallel=True,
    media=frozenset({IMAGE}),
)
