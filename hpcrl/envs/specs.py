"""The built-in environments, and where each is."""

from __future__ import annotations

from hpcrl.spec.kinds import EnvSpec

SCRIPTED = EnvSpec(
    about="Asks once more, then compares the last answer; for tests and as an example.",
    make="hpcrl.envs.scripted:ScriptedEnv",
)
SOKOBAN = EnvSpec(about="Boxes to push to their places.")
FROZEN_LAKE = EnvSpec(about="A way over a frozen lake with holes.")
WEBSHOP = EnvSpec(about="A shop to search and buy in.")
CLASS = EnvSpec(about="A class of yours.", make="hpcrl.envs.making:env_class", imports_code="class_path")
