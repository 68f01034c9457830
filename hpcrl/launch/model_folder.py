"""Checks whether a folder contains a loadable model, from file headers only: no torch, no weights read."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.models.families import PLANNED, SEEING_SCORERS, family_of, read_shape
from hpcrl.models.head_labels import labels_in, refusal
from hpcrl.models.mtp import num_mtp_layers
from hpcrl.models.shape import CannotPlanError, decoder_keys, wrong_size
from hpcrl.models.transformers_models import SCALAR_HEADS

MAX_SHOWN = 4
"""Maximum number of wrong tensors to name; further ones are counted."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "score.weight"
"""The head of an exported critic, which has no vocabulary projection."""
NO_TOKENIZER = "no tokenizer in"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
OTHER_WEIGHTS = {
    "*.bin": "is pickled: save the model again as safetensors",
    "*.pth": "has Meta's layout: use the model's folder in HF layout, whose config.json names an architecture",
    "*.gguf": "is for llama.cpp, mostly quantised: use the folder in HF layout from which it was made",
}
"""Weights in other formats, by pattern of file names."""
OTHER_NAMES = ("tok_embeddings.weight", "embedding.word_embeddings.weight", "transformer.wte.weight")
"""Names of the embedding in the layouts of Meta and Mistral, of Megatron, and of GPT-2."""
SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
OPTIONAL_SIZES = ("head_dim", "num_key_value_heads", "intermediate_size", "max_position_embeddings")


@dataclass
class ModelFolder:
    """Facts about the model in a folder. `problems` has a line for each error that prevents loading, `notes` a line for
    each missing file that a plan does not need."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def model_type(self) -> str:
        """The model family (model_type of config.json)."""
        value = self.config.get("model_type")
        return value if isinstance(value, str) else ""

    @property
    def max_positions(self) -> int | None:
        """Maximum sequence length in tokens, if config.json gives it."""
        value = decoder_keys(self.config).get("max_position_embeddings")
        return None if value is None or wrong_size("max_position_embeddings", value) else int(value)


def inspect_model(path: Path, to_plan: bool = False, weightless: bool = False) -> ModelFolder:
    """Read config.json and the weight files' headers of a folder in HF layout. With `to_plan`, missing weights and a
    missing tokenizer are notes; with `weightless`, missing weights are notes, since nothing will load them."""
    found = ModelFolder(path)
    if not path.is_dir():
        found.problems.append(f"model.path: no folder {path}; give one with config.json, *.safetensors and a tokenizer")
        return found
    found.config = _read_json(path / "config.json", found)
    if found.config and not found.model_type:
        found.problems.append(f"model.path: {path / 'config.json'} has no model_type")
    lacking = found.notes if to_plan else found.problems
    for file, names in _weight_files(found, found.notes if weightless else lacking):
        header = _read_header(file, found)
        found.shapes |= header
        missing = sorted(names - header.keys()) if header else []
        if missing:
            found.problems.append(
                f"model.path: {file} lacks {missing[0]}, which the index assigns to it{_more(missing)}"
            )
    if not any((path / name).is_file() for name in TOKENIZERS):
        lacking.append(f"model.path: {NO_TOKENIZER} {path} (tokenizer.json)")
    if found.config:
        wrong = [*_wrong_sizes(found)] or [*_other_layout(found)] or [*_wrong_shapes(found)]
        found.problems += [f"model.path: {path}: {text}" for text in wrong[:MAX_SHOWN]]
        if len(wrong) > MAX_SHOWN:
            found.problems.append(
                f"model.path: {path}: and {len(wrong) - MAX_SHOWN} more tensors that do not match config.json"
            )
    return found


def check_scalar_head(found: ModelFolder, weights: Mapping[str, float]) -> Iterator[str]:
    """A line if config.json describes no reward model, as hpcrl.engines.scalar loads it with `weights` of the heads."""
    if found.config and (text := refusal(found.config, weights)):
        yield f"model.path: {found.path} {text}"
    elif _takes_images(found):
        text = "is a reward model that takes images, and the role reward_model scores texts only; give a text model, or"
        yield f"model.path: {found.path} {text} let a judge that takes images score (reward.NAME.name=judge)"


def check_first_head(config: Config, found: ModelFolder) -> Iterator[str]:
    """A line if a reward model cannot be trained from the folder: its head has several labels or is of another kind, or
    transformers has no such model with images."""
    names = found.config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    by_steps = config.head_training.rows == "steps"
    wanted = SCALAR_HEADS[by_steps]
    shape = found.shapes.get(HEAD)
    able = not by_steps and found.model_type in SEEING_SCORERS
    if _takes_images(found) and not able:
        why = "a model that scores steps (rm.rows=steps) is made of a text model"
        if not by_steps:
            why = f"transformers has no class ...{wanted} for its model_type, {found.model_type}"
            why += f", only for {' and '.join(SEEING_SCORERS)}"
        yield f"model.path: {found.path} takes images, and {why}; give such a model" + " or a text model" * (
            not by_steps
        )
    elif name.endswith(SCALAR_HEADS) and not name.endswith(wanted):
        yield (
            f"model.path: {found.path} has the head of {name}, and rm.rows={config.head_training.rows} trains one of "
            f"...{wanted}; give a language model, or a model of this kind"
        )
    elif shape is not None and shape[0] != (wants := len(config.head_training.labels)):
        yield (
            f"model.path: the head of {found.path} has {shape[0]} label{'s' * (shape[0] != 1)}, and a row gives "
            f"{wants} number{'s' * (wants != 1)} (rm.heads); give a language model, or a reward model with {wants}"
        )
    elif shape is not None and isinstance(config.head_training.heads, list):
        if (has := labels_in(found.config)) != config.head_training.heads:
            yield (
                f"model.path: the heads of {found.path} are {', '.join(has)}, and rm.heads has "
                f"{', '.join(config.head_training.heads)}; give the same names in the same order, or a language model"
            )
    elif name and not able and not name.endswith((*SCALAR_HEADS, "ForCausalLM", "LMHeadModel")):
        yield (
            f"model.path: {found.path} is of {name}, and a reward model is made of a text model; give a language model "
            "(...ForCausalLM) or a reward model"
        )


def check_chat_template(found: ModelFolder) -> Iterator[str]:
    """A line if the folder's tokenizer has no chat template."""
    if not any((found.path / name).is_file() for name in TOKENIZERS):
        return  # a problem or a note of inspect_model()
    if (found.path / "chat_template.jinja").exists():
        return
    try:
        content = json.loads((found.path / "tokenizer_config.json").read_text())
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not content.get("chat_template"):
        yield (
            f"model.path: the tokenizer in {found.path} has no chat template (tokenizer_config.json, "
            f"chat_template.jinja), which its messages need{_of_processor(found.path)}"
        )


def _of_processor(folder: Path) -> str:
    """A hint if only the processor has a chat template, which tokenizers do not read."""
    name = "chat_template.json"
    return f"; copy its text from {name} to chat_template.jinja" if (folder / name).exists() else ""


def _read_json(path: Path, found: ModelFolder) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        found.problems.append(f"model.path: no {path.name} in {path.parent}")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        found.problems.append(f"model.path: {path} cannot be read: {error}")
        return {}
    if not isinstance(content, dict):
        found.problems.append(f"model.path: {path} is not a JSON object")
        return {}
    return content


def _weight_files(found: ModelFolder, lacking: list[str]) -> Iterator[tuple[Path, set[str]]]:
    """Every weight file with the names that the index assigns to it; a line in `lacking` for each missing file."""
    folder, index = found.path, found.path / "model.safetensors.index.json"
    if index.is_file():
        files: dict[str, set[str]] = {}
        weight_map = _read_json(index, found).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            found.problems.append(f"model.path: {index} has no weight_map from tensors to files")
            return
        for name, file in weight_map.items():
            files.setdefault(file, set()).add(name)
        for file in sorted(files):
            if (folder / file).is_file():
                yield folder / file, files[file]
            else:
                lacking.append(
                    f"model.path: {folder / file} is missing, but {index.name} names it; copy or download it"
                )
    elif single := sorted(folder.glob("*.safetensors")):
        yield from ((file, set()) for file in single)
    else:
        other = next(((file, why) for pattern, why in OTHER_WEIGHTS.items() for file in folder.glob(pattern)), None)
        hint = f" ({other[0].name} {other[1]})" if other else ""
        lacking.append(f"model.path: no weights in {folder} (*.safetensors){hint}")


def _read_header(file: Path, found: ModelFolder) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of a safetensors file; checks the file size against the header."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            size = file.stat().st_size
            if length > size - 8:
                raise ValueError(f"its header claims {length} bytes")
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != size:
            raise ValueError(f"it has {size} bytes and should have {end}")
        return {name: tuple(int(size) for size in entry["shape"]) for name, entry in header.items()}
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found.problems.append(f"model.path: {file} is damaged: {error}; copy or download it again")
        return {}


def _takes_images(found: ModelFolder) -> bool:
    return family_of(found.model_type).vision is not None and bool(found.config.get("vision_config"))


def _other_layout(found: ModelFolder) -> Iterator[str]:
    """A line if the weights have another library's names, or if a model that takes images has no vision tower."""
    names, family = found.shapes, family_of(found.model_type)
    embedded = any(name.endswith(EMBEDDING.removeprefix("model.")) for name in names)
    other = next((name for name in names if name.endswith(OTHER_NAMES)), None)
    if other and not embedded and family.decoder is not None:
        yield f"the weights have the names of another library ({other}); give the folder in HF layout ({EMBEDDING})"
    if embedded and _takes_images(found) and not any("vis" in name for name in names):
        yield (
            f"config.json has a vision tower (vision_config), but none of the {len(names)} tensors belongs to it; add "
            "its weights, or use the config.json of the text model"
        )


def _wrong_sizes(found: ModelFolder) -> Iterator[str]:
    """Sizes that no model has; with too many layers, checks and plan would take hours. Families with unknown parameters
    may lack a size, or have one for each layer."""
    config = decoder_keys(found.config)
    known = found.model_type in PLANNED
    for name in (*SIZES, *OPTIONAL_SIZES):
        if config.get(name) is None:
            if known and name in SIZES:
                yield f"{name} in config.json is not set"
        elif (known or name in SIZES[-2:]) and (wrong := wrong_size(name, config[name])):
            yield f"{name} in config.json is {wrong}"


def _wrong_shapes(found: ModelFolder) -> Iterator[str]:
    """Tensors that are missing or have a shape different from config.json, for families whose parameters are known and
    have the same names in files. For other families the engine reports missing tensors when it loads the model."""
    config, shapes, family = found.config, found.shapes, family_of(found.model_type)
    if EMBEDDING not in shapes or family.decoder is None or family.renamed_in_files:
        return
    try:
        shape = read_shape(config)
    except CannotPlanError as error:
        yield str(error)
        return
    # Files store each expert of a layer separately.
    expected = {p.name: p.shape for p in shape.parameters if p.split != "expert"}
    if HEAD in shapes:
        expected.pop("lm_head.weight", None)
        named = "id2label" in config or "num_labels" in config  # else the head of a critic, with one value
        expected[HEAD] = (len(labels_in(config)) if named else 1, shape.hidden_size)
    for name, wanted in expected.items():
        if name not in shapes:
            yield f"{name} is missing from the weights"
        elif shapes[name] != wanted:
            yield f"{name} has shape {list(shapes[name])}, config.json requires {list(wanted)}"
    if f"model.layers.{shape.num_layers + num_mtp_layers(config)}.input_layernorm.weight" in shapes:
        yield f"the weights have more layers than num_hidden_layers = {shape.num_layers}"


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
