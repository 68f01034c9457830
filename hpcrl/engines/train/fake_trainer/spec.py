"""A trainer without a model, for debug=fake."""

from __future__ import annotations

from hpcrl.spec.kinds import TrainEngineSpec

SPEC = TrainEngineSpec(
    about="A trainer without a model, with configured durations, for debug=fake.",
    make="hpcrl.engines.train.fake_trainer.engine:make",
    segments=True,
    computes=frozenset({"entropy"}),
    make_critic="hpcrl.engines.train.fake_trainer.engine:make_critic",
    selectable=False,
)
