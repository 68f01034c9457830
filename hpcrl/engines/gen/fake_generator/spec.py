"""A generator without a model, for debug=fake."""

from __future__ import annotations

from hpcrl.spec.kinds import GenEngineSpec

SPEC = GenEngineSpec(
    about="A generator without a model, with configured durations, for debug=fake.",
    make="hpcrl.engines.gen.fake_generator.engine:make",
    offered=False,
)
