"""Write prime_rl_goldens.json, prime-rl's own loss of weighted tokens, from its file src/prime_rl/trainer/rl/loss.py:

    python -m tests.algorithms.prime_rl_goldens CLONE_OF_PRIME_RL

Only that file is executed, with its annotations' libraries and its configuration classes replaced.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

GOLDENS = Path(__file__).with_suffix(".json")
LENGTHS = [7, 5, 9]
FILE = "src/prime_rl/trainer/rl/loss.py"


class _Anything:
    """Stands for the types of jaxtyping and for configuration classes."""

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


def loss_module(clone: Path) -> Any:
    """prime-rl's module of losses, as committed in the clone."""
    source = subprocess.run(["git", "show", f"HEAD:{FILE}"], cwd=clone, capture_output=True, text=True, check=True)
    names = ("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig", "LossConfig")
    stand_ins: dict[str, dict[str, Any]] = {
        "beartype": {"beartype": lambda function: function},
        "jaxtyping": {
            **{name: _Anything for name in ("Bool", "Float", "Int")},
            "jaxtyped": lambda **_: lambda function: function,
        },
        "prime_rl.configs.trainer": {name: type(name, (), {}) for name in names},
        "prime_rl.utils.utils": {"import_object": None},
    }
    for name, values in stand_ins.items():
        module = types.ModuleType(name)
        module.__dict__.update(values)
        sys.modules[name] = module
    module = types.ModuleType("prime_rl_loss")
    sys.modules[module.__name__] = module
    exec(compile(source.stdout, FILE, "exec"), module.__dict__)
    return module


def main(clone: Path) -> None:
    losses, random = loss_module(clone), torch.Generator().manual_seed(0)

    def rows(low: float, high: float) -> list[torch.Tensor]:
        return [low + (high - low) * torch.rand(length, generator=random) for length in LENGTHS]

    trainer = [values.requires_grad_() for values in rows(-3.0, -1.5)]
    inference = [values.detach() + offset for values, offset in zip(trainer, rows(-0.2, 0.2), strict=True)]
    teacher, advantages = rows(-4.0, -0.5), rows(-2.0, 2.0)
    # Each component misses some tokens, and some tokens have all three.
    weights = [[(values - 0.7).clamp(min=0) for values in rows(0.0, 2.0)] for _ in range(3)]
    section = SimpleNamespace(dppo_mask_high=10.0, dppo_mask_low=10.0, adv_tau=1.0, kl_tau=0.0)
    count = sum(LENGTHS)
    loss, metrics = losses.compute_loss(
        trainer_logprobs=trainer,
        inference_logprobs=inference,
        ref_logprobs=teacher,
        advantages=advantages,
        loss_mask=[torch.ones(length, dtype=torch.bool) for length in LENGTHS],
        rl_weights=weights[0],
        ce_weights=weights[1],
        ref_kl_weights=weights[2],
        rl_loss_fn=lambda inputs: losses.default_loss_fn(inputs, section),
        rl_scale=count,
        ce_scale=count,
        ref_kl_scale=count,
    )
    assert not metrics["ref_kl/is_masked"].any(), "no token is outside the trust region"
    loss.backward()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True, check=True)
    named = {
        "trainer": trainer,
        "inference": inference,
        "teacher": teacher,
        "advantages": advantages,
        "rl_weights": weights[0],
        "ce_weights": weights[1],
        "ref_kl_weights": weights[2],
        "gradient": [values.grad for values in trainer],
    }
    made_by = {"repository": "PrimeIntellect-ai/prime-rl", "commit": commit.stdout.strip(), "torch": torch.__version__}
    stored = {"made_by": made_by, "loss": loss.item()}
    stored |= {name: [values.tolist() for values in parts] for name, parts in named.items()}
    GOLDENS.write_text(json.dumps(stored) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
