"""Learning rates by hand, and as transformers' schedulers give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcrl.config import TrainerConfig, parse
from hpcrl.config.reading import ConfigError
from hpcrl.engines.train.schedule import learning_rate

PEAK, LEAST, WARMUP, TOTAL, DECAY = 0.8, 0.2, 3, 14, 5


def rates(**keys: Any) -> list[float]:
    config = TrainerConfig(**{"lr": PEAK, "lr_warmup_steps": WARMUP} | keys)
    return [learning_rate(config, step, TOTAL) for step in range(TOTAL + 2)]


def theirs(make: str, **keys: Any) -> list[float]:
    """transformers' rates, which begin with a step of rate 0 and reach the end after the last step."""
    from transformers import optimization

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler = getattr(optimization, make)(optimizer, num_warmup_steps=WARMUP, **keys)
    found = []
    for _ in range(TOTAL + 2):
        found += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    return found


def test_learning_rates_by_hand() -> None:
    linear = TrainerConfig(lr=1.0, min_lr=0.1, lr_warmup_steps=2, lr_schedule="linear")
    assert [round(learning_rate(linear, step, 6), 6) for step in range(8)] == [0.5, 1.0, 1.0, 0.7, 0.4, 0.1, 0.1, 0.1]
    cosine = TrainerConfig(lr=1.0, lr_schedule="cosine")
    assert [round(learning_rate(cosine, step, 5), 6) for step in range(5)] == [1.0, 0.853553, 0.5, 0.146447, 0.0]
    assert learning_rate(TrainerConfig(lr=0.3), 99, 5) == 0.3
    assert learning_rate(TrainerConfig(lr=1.0, lr_warmup_steps=4), 0, 5) == 0.25
    wsd = TrainerConfig(lr=1.0, min_lr=0.5, lr_warmup_steps=2, lr_schedule="wsd", lr_decay_steps=2)
    assert [learning_rate(wsd, step, 6) for step in range(8)] == [0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.5, 0.5]
    tenth = TrainerConfig(lr=1.0, lr_schedule="wsd")
    assert [learning_rate(tenth, step, 20) for step in (0, 17, 18, 19)] == [1.0, 1.0, 0.5, 0.0]
    assert learning_rate(tenth, 0, 1) == 1.0


@pytest.mark.parametrize(
    ("name", "least", "make", "more"),
    [
        ("constant", 0.0, "get_constant_schedule_with_warmup", {}),
        ("linear", 0.0, "get_linear_schedule_with_warmup", {"num_training_steps": TOTAL - 1}),
        (
            "cosine",
            LEAST,
            "get_cosine_with_min_lr_schedule_with_warmup",
            {"num_training_steps": TOTAL - 1, "min_lr": LEAST},
        ),
        (
            "wsd",
            LEAST,
            "get_wsd_schedule",
            {
                "num_training_steps": TOTAL - 1,
                "num_decay_steps": DECAY,
                "decay_type": "linear",
                "min_lr_ratio": LEAST / PEAK,
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_schedules_are_those_of_transformers(name: str, least: float, make: str, more: dict[str, Any]) -> None:
    """With two differences: the first step already has a rate above 0, and the last step has the final rate. So the
    warm-up is one step ahead, and the rest has one step fewer."""
    mine = rates(lr_schedule=name, min_lr=least, **({"lr_decay_steps": DECAY} if name == "wsd" else {}))
    warmup = theirs("get_constant_schedule_with_warmup")
    assert mine[:WARMUP] == pytest.approx(warmup[1 : WARMUP + 1])
    assert mine[WARMUP:TOTAL] == pytest.approx(theirs(make, **more)[WARMUP:TOTAL])
    assert mine[TOTAL - 1] == mine[TOTAL] == pytest.approx(PEAK if name == "constant" else least)


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"lr_schedule": "wsd", "lr_decay_steps": 9}, "trainer.lr_decay_steps: 9 and lr_warmup_steps=2 are more than"),
        ({"lr_schedule": "wsd", "min_lr": 1.0}, "trainer.min_lr: 1 is above trainer.lr"),
        ({"lr_schedule": "wsdd"}, "trainer.lr_schedule: expected"),
        ({"lr_schedule": "wsd", "lr_decay_steps": 0}, "trainer.lr_decay_steps: "),
    ],
)
def test_invalid_schedules_are_refused(trainer: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"max_steps": 10, "trainer": {"lr_warmup_steps": 2, **trainer}})
    assert any(expected in line for line in caught.value.problems), caught.value.problems
