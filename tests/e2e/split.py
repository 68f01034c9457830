"""A generation engine for tests whose replicas may be of several ranks: generator.engine=tests.e2e.split:SPEC."""

from __future__ import annotations

from hpcrl.engines.gen.native.spec import NativeConfig
from hpcrl.spec.kinds import GenEngineSpec

SPEC = GenEngineSpec(
    about="The native engine on every rank of a replica, which compare all that they are told and all that they do.",
    make="tests.e2e.split_engine:make",
    section=NativeConfig,
    families=("qwen2",),
    tensor_parallel=True,
    recompute=True,
    deterministic=True,
)
