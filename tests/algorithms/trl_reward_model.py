"""Writes losses, gradients and metrics of TRL's RewardTrainer to trl_reward_model.json; runs in TRL's own environment:

.venv-trl/bin/python tests/algorithms/trl_reward_model.py [FILE]
"""

import json
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GOLDENS = Path(__file__).with_suffix(".json")
CASES: list[dict[str, Any]] = [
    {"chosen": [0.5, -1.25, 3.0], "rejected": [0.25, 0.75, -2.0], "margin": None, "coef": None},
    {"chosen": [0.5, -1.25, 3.0], "rejected": [0.25, 0.75, -2.0], "margin": [0.0, 1.5, 0.25], "coef": None},
    {"chosen": [0.5, 2.0, 2.0], "rejected": [0.5, 4.0, -1.0], "margin": None, "coef": 0.01},
    {"chosen": [30.0, -40.0], "rejected": [-30.0, 60.0], "margin": [3.0, -2.0], "coef": 0.1},
]


def computed(case: dict[str, Any]) -> dict[str, Any]:
    """Results of TRL's own compute_loss on a model that returns the case's rewards."""
    import torch
    from trl import RewardTrainer

    logits = torch.tensor([*case["chosen"], *case["rejected"]], requires_grad=True)
    model = SimpleNamespace(training=True)
    alone = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    metrics: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    arguments = SimpleNamespace(center_rewards_coefficient=case["coef"])
    trainer = SimpleNamespace(
        model=model, args=arguments, accelerator=alone, _metrics=metrics, _total_train_tokens=0, _tp_size=1
    )
    inputs = {"attention_mask": torch.ones(len(logits), 4)}
    if case["margin"] is not None:
        inputs["margin"] = torch.tensor(case["margin"])
    output = SimpleNamespace(logits=logits[:, None])
    loss = RewardTrainer.compute_loss(trainer, lambda **_: output, inputs)
    loss.backward()
    found = {name: values[0] for name, values in metrics["train"].items() if name != "num_tokens"}
    return {"loss": loss.item(), "gradient": logits.grad.tolist(), "metrics": found}


def goldens() -> dict[str, Any]:
    """The content of the file."""
    versions = {name: version(name) for name in ("trl", "transformers", "torch")}
    return {"versions": versions, "cases": [{**case, **computed(case)} for case in CASES]}


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDENS
    target.write_text(json.dumps(goldens(), indent=1) + "\n")
