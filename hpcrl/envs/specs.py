"""The specifications of the built-in environments."""

from __future__ import annotations

from hpcrl.spec.kinds import EnvSpec

SCRIPTED = EnvSpec(
    about="Asks for a second answer and compares it with the gold answer; for tests and as an example.",
    make="hpcrl.envs.scripted:ScriptedEnv",
)
SOKOBAN = EnvSpec(about="Sokoban: push boxes to their targets.")
FROZEN_LAKE = EnvSpec(about="FrozenLake: find a path across the ice.")
WEBSHOP = EnvSpec(about="WebShop: search for a product and buy it.")
CLASS = EnvSpec(about="A user-defined class.", make="hpcrl.envs.making:env_class", imports_code="class_path")
