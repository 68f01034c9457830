"""The specification of the environment tools, with its options."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from hpcrl.envs.spec import Penalty
from hpcrl.envs.tool_formats.table import FORMATS, FormatName
from hpcrl.spec.fields import NUMBER, Positive, SandboxLevel, Seconds, Section
from hpcrl.spec.kinds import EnvSpec

NAMES = ("python", "calculator", "guess", "crop")


def _tools(names: list[str]) -> list[str]:
    for name in names:
        module, _, function = name.partition(":")
        if name not in NAMES and not (module and function.isidentifier()):
            raise ValueError(f"{name!r} is no tool; there are {', '.join(NAMES)}, and functions as module:function")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]!r} is named twice")
    return names


class ToolOptions(Section):
    """Options of the environment tools."""

    tools: Annotated[list[str], Field(min_length=1), AfterValidator(_tools)]
    """Built-in tools (python, calculator, guess, crop), and your functions as module:function, which their annotations
    and docstring (with a section Args) describe to the model."""
    format: FormatName = "auto"
    """How the model writes calls; auto: as its chat template renders them. A name (docs/environments.md) is refused if
    it does not read what the template renders."""
    prompt: str = "{prompt}"
    """First prompt; {prompt} is the last message of the row."""
    tool_timeout_s: Seconds = 5.0
    """Timeout of a call, seconds; its result then reports the timeout to the model."""
    max_calls: Annotated[int, Field(ge=1, le=64), NUMBER] = 8
    """Maximum calls of a turn that are executed; one result reports to the model that further calls are not."""
    max_result_chars: Annotated[int, Field(ge=64), NUMBER] = 4096
    """Maximum length of a result; of longer results the middle is omitted."""
    invalid_reward: Penalty = 0.0
    """Reward of a turn with an invalid call: no JSON, an unknown tool or wrong arguments."""
    min_level: SandboxLevel = "L1"
    """python: minimum isolation level for programs (docs/security.md); L0 is unsafe."""
    memory_mib: Annotated[int, Field(ge=64), NUMBER] = 1024
    """python: memory of a program, MiB."""
    highest: Positive = 100
    """guess: largest number; the smallest is 1."""
    crop_zoom: Annotated[float, Field(gt=0, le=16), NUMBER] = 2.0
    """crop: factor by which a region is enlarged."""
    crop_unit: Positive = 28
    """crop: the model's patch size x merge size, of which the sides of its images are multiples."""
    crop_min_pixels: Positive = 56 * 56
    """crop: the model's min_pixels (preprocessor_config.json); smaller images are enlarged."""
    crop_max_pixels: Positive = 28 * 28 * 1280
    """crop: the model's max_pixels; larger images are shrunk."""

    @model_validator(mode="after")
    def _some_size(self) -> Self:
        if self.crop_unit**2 > self.crop_max_pixels or self.crop_min_pixels > self.crop_max_pixels:
            raise ValueError(f"crop_max_pixels={self.crop_max_pixels} allows no image")
        return self


def _expert_obstacle(options: ToolOptions) -> str:
    if options.tools != ["guess"]:
        return "tools: only [guess] has an expert"
    if options.format != "auto" and not FORMATS[options.format].written:
        able = ", ".join(name for name, known in FORMATS.items() if known.written)
        return f"format: calls in {options.format} have special tokens, which a text cannot have; choose from {able}"
    return ""


def _row_obstacle(options: ToolOptions) -> str:
    return "prompt: give a text without {prompt}, since there is no row" if "{prompt}" in options.prompt else ""


TOOLS = EnvSpec(
    about="Tools that the model calls until it gives its final answer.",
    make="hpcrl.envs.tools.env:ToolEnv",
    section=ToolOptions,
    probe="hpcrl.envs.tools.env:probe",
    check_template="hpcrl.envs.tool_formats.deriving:check",
    has_expert=True,
    shows=lambda options: None if "crop" in options.tools else frozenset(),
    expert_obstacle=_expert_obstacle,
    row_obstacle=_row_obstacle,
)
