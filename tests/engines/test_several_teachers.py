"""Tokens of several teachers in one micro-batch: each token's divergence is from its own teacher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.interface import TeacherHead
from hpcrl.engines.train.fsdp2.logits import Head
from hpcrl.engines.train.fsdp2.taught import TaughtStates
from hpcrl.engines.train.fsdp2.token_divergence import token_divergence
from hpcrl.engines.train.teacher_head import read_teacher_head
from hpcrl.spec.divergence import Divergence
from tests.contracts.splits import Split
from tests.engines.test_teaching import LENGTHS, Distilling, Run, told
from tests.engines.worlds import make_batch, make_model_folder, norms_of, worst_difference

pytestmark = pytest.mark.numerics

TOKENS, WORDS = 11, 37
WIDTHS, ROWS = (6, 4, 5), (WORDS, WORDS + 3, WORDS + 1)
NUMBERS = torch.tensor([1, 0, 0, 2, 1, 1, 0, 2, 2, 0, 1])
FULL = Divergence("full", 0.5, 0, 0.7)


def heads() -> list[TeacherHead]:
    """Of other widths, and of vocabularies with other padding; one with a softcap and a scale, one with a bias."""
    draw = torch.Generator().manual_seed(4)
    matrices = [torch.randn(rows, width, generator=draw) for rows, width in zip(ROWS, WIDTHS, strict=True)]
    return [
        TeacherHead(matrices[0]),
        TeacherHead(matrices[1], softcap=2.0, scale=1.5),
        TeacherHead(matrices[2], bias=torch.randn(ROWS[2], generator=draw)),
    ]


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_each_tokens_value_and_gradient_are_those_of_its_teacher_alone(chunk_tokens: int) -> None:
    draw = torch.Generator().manual_seed(5)
    states, hidden = torch.randn(TOKENS, max(WIDTHS), generator=draw), torch.randn(TOKENS, 8, generator=draw)
    weight, factors = torch.randn(WORDS, 8, generator=draw), torch.linspace(-1, 2, TOKENS)
    given = {"head": Head(), "chunk_tokens": chunk_tokens}

    def inputs() -> tuple[Tensor, Tensor]:
        return hidden.clone().requires_grad_(), weight.clone().requires_grad_()

    first, *further = heads()
    together, alone = inputs(), inputs()
    values = token_divergence(*together, None, TaughtStates(FULL, states, first, tuple(further), NUMBERS), **given)
    (values * factors).sum().backward()
    for number, head in enumerate([first, *further]):
        tokens = (number == NUMBERS).nonzero()[:, 0]
        own = TaughtStates(FULL, states[tokens, : WIDTHS[number]], head)
        expected = token_divergence(alone[0][tokens], alone[1], None, own, **given)
        assert torch.allclose(values[tokens], expected, rtol=0, atol=1e-6)
        (expected * factors[tokens]).sum().backward()
    for got, wanted in zip(together, alone, strict=True):
        assert got.grad is not None and wanted.grad is not None
        assert torch.allclose(got.grad, wanted.grad, rtol=0, atol=1e-5)
    wrong = TaughtStates(FULL, states, first, tuple(further), NUMBERS.roll(1))
    assert not torch.allclose(token_divergence(*inputs(), None, wrong, **given), values, atol=1e-2)


@pytest.mark.usefixtures("world_of_one")
def test_an_engine_reads_the_teacher_of_each_row(tmp_path: Path) -> None:
    student = make_model_folder("qwen2", tmp_path / "student")
    folders = [make_model_folder("llama", tmp_path / str(width), hidden_size=width) for width in (40, 24)]
    teachers = [read_teacher_head(folder, torch.float32) for folder in folders]
    run, numbers = Run("fsdp2", Split(1), student), torch.tensor([0, 1, 1, 0, 1, 0], dtype=torch.int32)
    batch, single = make_batch(LENGTHS), list[tuple[float, dict[str, Tensor]]]()
    plan = [[0, 1, 4], [2, 3, 5], []]
    batch.teacher_states = torch.zeros(batch.num_tokens, 40)
    with torch.no_grad():
        of_each = [told(folder, batch)[0] for folder in folders]
    for number, states in enumerate(of_each):
        chosen = (numbers == number)[batch.row_ids]
        batch.teacher_states[chosen, : states.shape[1]] = states[chosen]
        own = replace(batch, columns=batch.columns | {"teacher_states": states}).select(
            (numbers == number).nonzero()[:, 0].tolist()
        )
        objective = Distilling(FULL, teachers[number])
        stats = run.engine.accumulate(own, [[0, 1, 2]], objective, norms_of(batch))
        grads = {name: p.grad.clone() for name, p in run.engine.model.named_parameters() if p.grad is not None}
        run.engine.discard_gradients()
        single.append((stats["actor/divergence"].total, grads))
    objective = Distilling(FULL, teachers[0])
    objective.further_heads = tuple(teachers[1:])
    with pytest.raises(ValueError, match=r"^batch.teachers must be filled for the divergence from several teachers"):
        run.engine.accumulate(batch, plan, objective, norms_of(batch))
    run.engine.discard_gradients()
    batch.teachers = numbers
    stats = run.engine.accumulate(batch, plan, objective, norms_of(batch))
    assert stats["actor/divergence"].total == pytest.approx(sum(total for total, _ in single), rel=1e-5)
    grads = {name: p.grad for name, p in run.engine.model.named_parameters() if p.grad is not None}
    wanted = {name: single[0][1][name] + single[1][1][name] for name in grads}
    assert worst_difference(grads, wanted) < 2e-5
