"""Map a tensor of a transformers model in memory to its tensors in files: another name, or one tensor per expert.

This reverses transformers' own table of conversions, as far as its kinds of conversion are supported here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from hpcrl.spec.weight_layout import TensorSlice

_BEGINNING = re.compile(r"\^([^(]*)(\(\?!.*\))?")
"""A pattern for the beginning of a name, which may exclude what follows."""


class InFile(NamedTuple):
    """A tensor in a file, and its position in the tensor in memory, which may be stacked over experts."""

    name: str
    shape: tuple[int, ...]
    leading: TensorSlice
    first_row: int


class FileNames:
    """The file names of a model_type. ValueError if transformers lacks it or uses an unsupported kind of conversion."""

    def __init__(self, model_type: Any):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING

        if model_type not in CONFIG_MAPPING_NAMES:
            raise ValueError(f"transformers has no model_type {model_type!r}")
        self._renamed: list[tuple[str, str]] = []
        self._stacked: list[tuple[str, list[str]]] = []
        self._beginnings: list[tuple[str, str]] = []
        # Rules of a vision-language model may be those of its class.
        rules = get_checkpoint_conversion_mapping(model_type) or get_checkpoint_conversion_mapping(
            SEEING.get(model_type, "")
        )
        for rule in rules or ():
            if type(rule) is PrefixChange and (rule.model_prefix, rule.prefix_to_remove) == ("model", "language_model"):
                continue  # a decoder's name in a vision-language model, which files need not have
            begins = [_BEGINNING.fullmatch(pattern) for pattern in rule.source_patterns]
            in_memory = [_plain(name) for name in rule.target_patterns]
            if type(rule) is WeightRenaming and len(begins) == len(in_memory) == 1 and begins[0]:
                begin = _plain(begins[0][1])
                # There, files have a whole causal language model, of which memory has the decoder.
                self._beginnings.append((in_memory[0], f"{begin}.model" if begin == "language_model" else begin))
                continue
            names = [_plain(pattern) for pattern in rule.source_patterns]
            if type(rule) is WeightRenaming and len(names) == len(in_memory) == 1:
                self._renamed.insert(0, (in_memory[0], names[0]))
            elif type(rule) is WeightConverter and len(in_memory) == 1 and _stacks_experts(rule.operations, len(names)):
                self._stacked.append((in_memory[0], names))
            else:
                raise ValueError(f"files of model_type {model_type!r} are made by {type(rule).__name__} of {names}")

    def of(self, name: str, shape: tuple[int, ...]) -> Iterator[InFile]:
        """The tensors in files for a tensor in memory."""
        for in_memory, names in self._stacked:
            if name.endswith(in_memory):
                count, rows, columns = shape
                size = rows // len(names)
                for expert in range(count):
                    for number, in_file in enumerate(names):
                        full = name.removesuffix(in_memory) + in_file.replace("*", str(expert))
                        tensor_slice = ((expert, expert + 1),)
                        yield InFile(self._rename(full), (size, columns), tensor_slice, number * size)
                return
        yield InFile(self._rename(name), shape, (), 0)

    def _rename(self, name: str) -> str:
        for in_memory, in_file in self._beginnings:
            if name.startswith(in_memory):
                name = in_file + name.removeprefix(in_memory)
                break
        for in_memory, in_file in self._renamed:
            name = name.replace(in_memory, in_file)
        return name


def _plain(pattern: str) -> str:
    """The plain text of a pattern that only escapes dots. ValueError for any other pattern."""
    text = re.sub(r"\\(?=[.])", "", pattern)
    if re.search(r"[\\^$()+?|\[\]{}]", text):
        raise ValueError(f"its file names are a pattern, not text: {pattern}")
    return text


def _stacks_experts(operations: list[Any], num_sources: int) -> bool:
    """Whether these operations stack the experts, then concatenate gate and up."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    dims = [(type(operation), getattr(operation, "dim", None)) for operation in operations]
    return dims == [(MergeModulelist, 0)] + [(Concatenate, 1)] * (num_sources > 1)
