"""Write trl_divergences.json: TRL's own GKD loss of random logits, per token, and its gradient.

    .venv-trl/bin/python tests/engines/goldens/write_trl_divergences.py FILE

.venv-trl is made by tests/bench/trl/setup.sh. Logits are products of small matrices, which are in the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import trl
from trl.experimental.gkd import GKDTrainer

TOKENS, WIDTH, WORDS = 4, 3, 7


def golden(beta: float, temperature: float) -> dict[str, Any]:
    """Losses of single tokens and the gradient of their weighted sum by the student's states and matrix."""
    generator = torch.Generator().manual_seed(round(100 * beta + 10 * temperature))
    student, teacher = (
        [torch.randn(rows, WIDTH, generator=generator) * 1.5 for rows in (TOKENS, WORDS)] for _ in range(2)
    )
    states, matrix = (tensor.requires_grad_() for tensor in student)
    logits, of_teacher = states @ matrix.T, teacher[0] @ teacher[1].T
    losses = [
        GKDTrainer.generalized_jsd_loss(one[None, None], two[None, None], beta=beta, temperature=temperature)
        for one, two in zip(logits, of_teacher, strict=True)
    ]
    weights = torch.linspace(-1, 2, TOKENS)
    (torch.stack(losses) * weights).sum().backward()
    named = {"states": states, "matrix": matrix, "teacher_states": teacher[0], "teacher_matrix": teacher[1]}
    named |= {"losses": torch.stack(losses), "weights": weights}
    named |= {"states_gradient": states.grad, "matrix_gradient": matrix.grad}
    return {"beta": beta, "temperature": temperature} | {name: tensor.tolist() for name, tensor in named.items()}


def main() -> None:
    cases = [golden(beta, temperature) for beta in (0.0, 0.1, 0.5, 0.9, 1.0) for temperature in (1.0, 0.6)]
    content = {"trl": trl.__version__, "torch": torch.__version__, "cases": cases}
    Path(sys.argv[1]).write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
