"""The model families of the installed transformers, found without importing it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcrl.models.families import family_of
from hpcrl.models.quantisation import quantised

TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
SCALAR_HEADS = ("ForSequenceClassification", "ForTokenClassification")
"""Endings of reward models' architecture names; the second is also the ending for an exported critic."""


@functools.cache
def causal_families() -> frozenset[str]:
    """Every model_type with a causal language model in transformers; empty if its tables are not found."""
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return frozenset()
    file = Path(package.origin).with_name("models") / "auto" / "modeling_auto.py"
    if not file.is_file():
        return frozenset()
    for statement in ast.parse(file.read_text()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[pairs])) if name == TABLE:
                return frozenset(dict(ast.literal_eval(pairs)))
    return frozenset()


def untrainable(model: Mapping[str, Any]) -> Iterator[str]:
    """Why an engine that trains transformers' decoders cannot train this config.json's decoder
    (TrainEngineSpec.unsupported)."""
    family, known = model.get("model_type"), causal_families()
    if why := family_of(family).untrainable:
        yield f"does not train model_type={family}: {why}"
    elif known and family not in known and family_of(family).vision is None:
        code = "; the code that the folder brings along (auto_map) is never run" if model.get("auto_map") else ""
        yield f"trains decoders of transformers, and {version('transformers')} has none of model_type={family}{code}"
    yield from quantised(model)
