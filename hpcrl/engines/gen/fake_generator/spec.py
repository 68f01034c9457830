"""A generator without a model, for debug=fake."""

from __future__ import annotations

from hpcrl.spec.kinds import GenEngineSpec
from hpcrl.spec.media import IMAGE

SPEC = GenEngineSpec(
    about="A generator without a model, with configured durations, for debug=fake.",
    make="hpcrl.engines.gen.fake_generator.engine:make",
    media=frozenset({IMAGE}),
    selectable=False,
)
