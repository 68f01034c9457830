"""Writes dpo.json: values, gradients and metrics of TRL's own loss code on pairs. Run in TRL's environment
(tests/bench/trl/setup.sh): .venv-trl/bin/python tests/algorithms/goldens/make_dpo.py [FILE]

The model is a table: the logits after token t are row t. TRL's trainers are not built; the methods that compute their
losses run unchanged, on an object with the attributes that they read.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import trl
from torch import Tensor, nn
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

VOCAB = 7
PAIRS = [  # prompt, chosen, rejected
    ([0], [1, 2, 3], [4, 5]),
    ([0], [2], [6, 6, 1, 3]),
    ([0], [5, 1, 4, 2, 6], [3]),
    ([0], [3, 3], [1, 5]),
]
"""Prompts have one token, so ORPO's cross-entropy, which TRL computes over prompts as well, is that of the answers."""
LABELLED = [([0, 3], [1, 2, 3], True), ([4], [5, 1], False), ([2, 2, 6], [4], True), ([5], [6, 3, 2, 1], True)]
SCORES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen")
METRICS = (*SCORES, "logps/rejected", "nll_loss", "kl")


class Table(nn.Module):
    """The model; `spread` scales its logits."""

    is_gradient_checkpointing = False

    def __init__(self, seed: int, spread: float):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(spread * torch.randn(VOCAB, VOCAB, generator=generator).double())

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        logits = self.table[input_ids]
        if labels is None:
            return SimpleNamespace(logits=logits)
        targets, before = labels[:, 1:], logits[:, :-1]
        log_p = before.log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
        zeros = torch.zeros_like(log_p)
        masked = torch.where(targets >= 0, log_p, zeros)
        return SimpleNamespace(
            log_probs=masked, entropy=zeros, mean_logits=zeros, is_top1=torch.zeros_like(log_p, dtype=torch.bool)
        )


POLICY, REFERENCE = Table(2, 1.0), Table(1, 1.5)


def padded(rows: list[list[int]], fill: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


def inputs_of(rows: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """Ids, attention mask and completion mask of prompts with answers."""
    return {
        "input_ids": padded([prompt + answer for prompt, answer in rows], 0),
        "attention_mask": padded([[1] * len(prompt + answer) for prompt, answer in rows], 0),
        "completion_mask": padded([[0] * len(prompt) + [1] * len(answer) for prompt, answer in rows], 0),
    }


def trainer(**attributes: Any) -> Any:
    """An object with the attributes that the loss methods read."""
    accelerator = SimpleNamespace(device="cpu", gather=lambda t: t, gather_for_metrics=lambda t: t)
    common = {"accelerator": accelerator, "model": POLICY, "ref_model": REFERENCE, "aux_loss_enabled": False}
    common |= {"_metrics": {"train": defaultdict(list)}, "_total_train_tokens": 0, "_tp_size": 1}
    common |= {"args": SimpleNamespace(gradient_checkpointing_kwargs=None), "precompute_ref_logps": False}
    return SimpleNamespace(**common | attributes)


def found(loss: Tensor, metrics: dict[str, Any]) -> dict[str, Any]:
    """The loss, its gradient for the table, and the metrics."""
    (gradient,) = torch.autograd.grad(loss, POLICY.table)
    values = {name: values[-1] if isinstance(values, list) else values for name, values in metrics.items()}
    kept = {name: float(values[name]) for name in METRICS if name in values}
    return {"loss": loss.item(), "gradient": gradient.flatten().tolist(), "metrics": kept}


def dpo(losses: list[str], weights: list[float] | None = None, free: bool = False, **keys: Any) -> dict[str, Any]:
    own = trainer(loss_types=losses, loss_weights=weights or [1.0], ld_alpha=None, use_weighting=False, **keys)
    own.f_divergence_type, own.precompute_ref_logps = "reverse_kl", free
    rows = [(prompt, answer) for n in (1, 2) for prompt, answer in ((pair[0], pair[n]) for pair in PAIRS)]
    inputs = inputs_of(rows)
    if free:
        inputs |= dict.fromkeys(("ref_chosen_logps", "ref_rejected_logps"), torch.zeros(len(PAIRS)))
    return found(DPOTrainer._compute_loss(own, POLICY, inputs, False), own._metrics["train"])


def without_reference(kind: Any, **keys: Any) -> dict[str, Any]:
    own = trainer(is_encoder_decoder=False, pad_token_id=0, padding_value=0, **keys)
    for name in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(kind, name):
            setattr(own, name, MethodType(getattr(kind, name), own))
    own.concatenated_inputs, own.get_batch_logps = kind.concatenated_inputs, kind.get_batch_logps
    batch = {}
    for n, name in ((1, "chosen"), (2, "rejected")):
        inputs = inputs_of([(pair[0], pair[n]) for pair in PAIRS])
        batch[f"{name}_input_ids"], batch[f"{name}_attention_mask"] = inputs["input_ids"], inputs["attention_mask"]
        batch[f"{name}_labels"] = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    return found(*kind.get_batch_loss_metrics(own, POLICY, batch))


def cpo(loss_type: str, **keys: Any) -> dict[str, Any]:
    defaults = {"alpha": 0.0, "label_smoothing": 0.0, "cpo_alpha": 0.0, "simpo_gamma": 0.5}
    return without_reference(CPOTrainer, loss_type=loss_type, **defaults | keys)


def conservative(beta: float, smoothing: float) -> dict[str, Any]:
    """Conservative DPO: CPO's loss, which smooths labels, of ratios to the reference."""
    sums = []
    for n in (1, 2):
        inputs = inputs_of([(pair[0], pair[n]) for pair in PAIRS])
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        both = [model(inputs["input_ids"], labels=labels).log_probs.sum(1) for model in (POLICY, REFERENCE)]
        sums.append(both[0] - both[1].detach())
    own = trainer(alpha=0.0, loss_type="sigmoid", beta=beta, label_smoothing=smoothing)
    return found(CPOTrainer.cpo_loss(own, *sums)[0].mean(), {})


def kto(**keys: Any) -> dict[str, Any]:
    own = trainer(loss_type="kto", calculate_KL=True, **keys)
    own._compute_kl_logps = MethodType(KTOTrainer._compute_kl_logps, own)
    rows = [(prompt, answer) for prompt, answer, _ in LABELLED]
    shifted = [(prompt, rows[n - 1][1]) for n, (prompt, _) in enumerate(rows)]
    inputs = inputs_of(rows) | {f"KL_{name}": value for name, value in inputs_of(shifted).items()}
    inputs["label"] = torch.tensor([label for *_, label in LABELLED])
    return found(KTOTrainer._compute_loss(own, POLICY, inputs, False), own._metrics["train"])


def case(found: dict[str, Any], **section: Any) -> dict[str, Any]:
    return {"section": section, **found}


def cases() -> list[dict[str, Any]]:
    """Keys of the section `dpo`, and what TRL computes."""
    plain = {"beta": 0.3, "label_smoothing": 0.0}
    smoothed = {"beta": 0.3, "label_smoothing": 0.2}
    weighted = {"desirable_weight": 0.7, "undesirable_weight": 1.3}
    return [
        case(dpo(["sigmoid"], **plain), loss="sigmoid", beta=0.3),
        case(dpo(["sigmoid"], beta=0.1), loss="sigmoid"),
        case(dpo(["sigmoid_norm"], **plain), loss="sigmoid", beta=0.3, length_normalized=True),
        case(dpo(["sigmoid"], free=True, **plain), loss="sigmoid", beta=0.3, reference_free=True),
        case(dpo(["sigmoid", "sft"], [1.0, 0.7], **plain), loss="sigmoid", beta=0.3, sft_weight=0.7),
        case(conservative(0.3, 0.2), loss="sigmoid", **smoothed),
        case(dpo(["ipo"], **plain), loss="ipo", beta=0.3),
        case(dpo(["robust"], **smoothed), loss="robust", **smoothed),
        case(cpo("simpo", beta=2.0), loss="simpo"),
        case(
            cpo("simpo", simpo_gamma=0.9, cpo_alpha=0.4, **smoothed),
            loss="simpo",
            gamma=0.9,
            sft_weight=0.4,
            **smoothed,
        ),
        case(cpo("sigmoid", beta=0.1, cpo_alpha=1.0), loss="cpo"),
        case(cpo("sigmoid", **smoothed), loss="cpo", sft_weight=0.0, **smoothed),
        case(without_reference(ORPOTrainer, beta=0.1), loss="orpo"),
        case(without_reference(ORPOTrainer, beta=0.8), loss="orpo", beta=0.8),
        case(kto(beta=0.1, desirable_weight=1.0, undesirable_weight=1.0), loss="kto"),
        case(kto(beta=0.4, **weighted), loss="kto", beta=0.4, **weighted),
    ]


def main() -> None:
    """Write the file."""
    given = {"policy": POLICY.table.flatten().tolist(), "reference": REFERENCE.table.flatten().tolist()}
    versions = {"trl": trl.__version__, "torch": torch.__version__}
    whole = {"versions": versions, "vocab": VOCAB, **given, "pairs": PAIRS, "labelled": LABELLED, "cases": cases()}
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("dpo.json")
    path.write_text(json.dumps(whole) + "\n")


if __name__ == "__main__":
    main()
