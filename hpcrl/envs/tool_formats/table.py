"""The table of tool formats, in the order in which they are tried on a chat template: the first format that reads its
calls is used. Formats with their own marks precede llama3_json, which reads any object that looks like a call."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from hpcrl.envs.tool_formats.reading import ToolFormat
from hpcrl.spec.table import SpecError, SpecTable

FORMATS = SpecTable(
    "tool format",
    ToolFormat,
    {
        "hermes": "hpcrl.envs.tool_formats.hermes:SPEC",
        "qwen3_coder": "hpcrl.envs.tool_formats.xml_parameters:QWEN3_CODER",
        "glm4": "hpcrl.envs.tool_formats.glm4:SPEC",
        "kimi_k2": "hpcrl.envs.tool_formats.kimi_k2:SPEC",
        "deepseek_v3": "hpcrl.envs.tool_formats.deepseek:V3",
        "deepseek_v3_1": "hpcrl.envs.tool_formats.deepseek:V3_1",
        "deepseek_v3_2": "hpcrl.envs.tool_formats.xml_parameters:DEEPSEEK_V3_2",
        "deepseek_v4": "hpcrl.envs.tool_formats.xml_parameters:DEEPSEEK_V4",
        "harmony": "hpcrl.envs.tool_formats.harmony:SPEC",
        "mistral": "hpcrl.envs.tool_formats.mistral:SPEC",
        "gemma4": "hpcrl.envs.tool_formats.gemma4:SPEC",
        "minimax_m2": "hpcrl.envs.tool_formats.xml_parameters:MINIMAX_M2",
        "seed_oss": "hpcrl.envs.tool_formats.xml_parameters:SEED_OSS",
        "nemotron": "hpcrl.envs.tool_formats.json_lists:NEMOTRON",
        "granite": "hpcrl.envs.tool_formats.json_lists:GRANITE",
        "apriel": "hpcrl.envs.tool_formats.json_lists:APRIEL",
        "cohere": "hpcrl.envs.tool_formats.json_lists:COHERE",
        "phi4_mini": "hpcrl.envs.tool_formats.json_lists:PHI4_MINI",
        "llama3_json": "hpcrl.envs.tool_formats.llama3_json:SPEC",
    },
)


def _known(name: str) -> str:
    if name != "auto":
        try:
            FORMATS[name]
        except SpecError as error:
            raise ValueError(str(error)) from None
    return name


FormatName = Annotated[str, AfterValidator(_known)]
"""auto, or a name of the table."""
