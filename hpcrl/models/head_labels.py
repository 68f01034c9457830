"""The names of a reward model's heads, in config.json transformers' labels of a classification model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.models.transformers_models import SCALAR_HEADS


def label_keys(labels: Sequence[str]) -> dict[str, Any]:
    """The entries of config.json for heads with these names; several are trained by regression."""
    numbers = {name: number for number, name in enumerate(labels)}
    found: dict[str, Any] = {"id2label": dict(enumerate(labels)), "label2id": numbers}
    return found | {"problem_type": "regression"} if len(labels) > 1 else found


def labels_in(config: Mapping[str, Any]) -> list[str]:
    """The names of the heads in a config.json. Without names, a model has transformers' two labels, or num_labels."""
    given = config.get("id2label")
    count = len(given) if isinstance(given, dict) else config.get("num_labels", 2)
    names = [f"LABEL_{n}" for n in range(count)] if isinstance(count, int) else []
    return [str(given.get(str(n), name)) for n, name in enumerate(names)] if isinstance(given, dict) else names


def refusal(config: Mapping[str, Any], weights: Mapping[str, float]) -> str:
    """Why a model with this config.json gives no score as the sum of its heads with these weights; empty if it does.
    One head needs no weight."""
    names, labels = config.get("architectures"), labels_in(config)
    name = str(names[0]) if isinstance(names, list) and names else "no architecture"
    if not name.endswith(SCALAR_HEADS):
        kinds = " or ...".join(SCALAR_HEADS)
        return f"is of {name} with {len(labels)} label(s); a reward model is ...{kinds}, with one label or several"
    if unknown := [head for head in weights if head not in labels]:
        return f"has no head {unknown[0]} of reward_model.head_weights; its heads are {', '.join(labels)}"
    if len(labels) != 1 and not weights:
        return (
            f"has {len(labels)} heads ({', '.join(labels)}); give the weight of each in the score, as in "
            f"reward_model.head_weights={{{labels[0] if labels else 'NAME'}: 1}}"
        )
    return ""
