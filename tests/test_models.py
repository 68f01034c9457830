"""Code about model families is in hpcrl/models, one file per family."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

from hpcrl.models.families import FAMILIES, LISTED, UNKNOWN, family_of, read_shape
from hpcrl.models.family import Family
from hpcrl.models.shape import CannotPlanError
from hpcrl.models.windows import attention_kinds
from tests.conftest import ROOT

FOLDER = ROOT / "hpcrl" / "models"


def families_of(file: Path) -> list[Family]:
    module = import_module(f"hpcrl.models.{file.stem}")
    return [value for value in vars(module).values() if isinstance(value, Family) and value is not UNKNOWN]


def test_every_family_is_in_the_table_once() -> None:
    found = [family for file in sorted(FOLDER.glob("*.py")) if file.stem != "__init__" for family in families_of(file)]
    assert len(found) == len(LISTED) == len({id(family) for family in (*found, *LISTED)})
    assert len(FAMILIES) == sum(len(family.model_types) for family in LISTED), "two families claim a model_type"


def compared(file: Path) -> list[int]:
    """Lines that compare a value with a family's name."""
    names = set(FAMILIES)
    lines = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            texts = {leaf.value for side in sides for leaf in ast.walk(side) if isinstance(leaf, ast.Constant)}
            lines += [node.lineno] if texts & names else []
    return lines


def test_no_other_code_compares_family_names(tmp_path: Path) -> None:
    files = [file for file in sorted((ROOT / "hpcrl").rglob("*.py")) if file.parent != FOLDER]
    assert {str(file.relative_to(ROOT)): lines for file in files if (lines := compared(file))} == {}
    bad = tmp_path / "bad.py"
    bad.write_text('def f(shape):\n    return shape.family in ("phi3", "other")\n')
    assert compared(bad) == [2]


def test_a_family_unknown_to_transformers_cannot_be_planned_but_is_not_refused() -> None:
    assert family_of("no_such") is UNKNOWN and not family_of("no_such").untrainable
    with pytest.raises(CannotPlanError, match="not known for model_type 'no_such'"):
        read_shape({"model_type": "no_such"})


@pytest.mark.parametrize("model", [{"model_type": "llama", "sliding_window": 8}, {"model_type": "olmo2"}])
def test_window_settings_are_ignored_if_the_models_code_has_no_windows(model: dict[str, object]) -> None:
    assert attention_kinds(model) == {"full_attention"}
