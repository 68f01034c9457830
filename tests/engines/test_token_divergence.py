"""The divergence of tokens in chunks: values and gradients of the dense formula in float64, and of TRL."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.interface import TeacherHead
from hpcrl.engines.train.fsdp2 import logits
from hpcrl.engines.train.fsdp2.logits import Head
from hpcrl.engines.train.fsdp2.taught import Taught, TaughtStates, TaughtTopK
from hpcrl.engines.train.fsdp2.token_divergence import LEAST_REST, token_divergence
from hpcrl.spec.divergence import Divergence, DivergenceForm
from tests.planner.measuring import peak_bytes

pytestmark = pytest.mark.numerics

TOKENS, WIDTH, WORDS, TEACHER_WIDTH = 11, 6, 29, 7
HEADS = [Head(), Head(softcap=2.0, scale=0.5)]


def student(with_bias: bool = False, words: int = WORDS) -> list[Tensor | None]:
    """States, matrix and bias, each to have a gradient."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(*shape, generator=generator) for shape in ((TOKENS, WIDTH), (words, WIDTH), (words,))]
    return [tensor.requires_grad_() if number < 2 or with_bias else None for number, tensor in enumerate(made)]


def teacher(head: Head = HEADS[0], with_bias: bool = False, words: int = WORDS) -> tuple[Tensor, TeacherHead]:
    """States and head."""
    generator = torch.Generator().manual_seed(1)
    states, weight, bias = (
        torch.randn(*shape, generator=generator)
        for shape in ((TOKENS, TEACHER_WIDTH), (words, TEACHER_WIDTH), (words,))
    )
    return states, TeacherHead(weight, bias if with_bias else None, head.softcap, head.scale)


def scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float) -> Tensor:
    z = torch.nn.functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    return (softcap * torch.tanh(z / softcap) if softcap else z) * scale


def plain(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """The definition, [n]."""
    q, p = log_q.exp(), log_p.exp()
    if beta == 0:
        return (p * (log_p - log_q)).sum(-1)
    if beta == 1:
        return (q * (log_q - log_p)).sum(-1)
    log_m = (beta * p + (1 - beta) * q).log()
    return beta * (p * (log_p - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)


def with_rest(log_p: Tensor, ids: Tensor) -> Tensor:
    """[n, k + 1]: the log-probs of k words and of all others."""
    chosen = log_p.gather(1, ids)
    others = log_p.exp().scatter(1, ids, 0.0).sum(-1, keepdim=True)
    return torch.cat([chosen, others.log()], 1)


def told(asked: Divergence, states: Tensor, head: TeacherHead) -> Taught:
    """What the teacher tells."""
    if asked.form == "full":
        return TaughtStates(asked, states, head)
    logits = scores(states, head.weight, head.bias, head.softcap, head.scale) / asked.temperature
    best = logits.log_softmax(-1).topk(asked.top_k)
    return TaughtTopK(asked, best.indices, best.values.float())


def dense(
    given: list[Tensor | None], asked: Divergence, states: Tensor, teacher_head: TeacherHead, head: Head
) -> Tensor:
    hidden, weight, bias = given
    assert hidden is not None and weight is not None
    common = min(len(weight), len(teacher_head.weight))
    of_student = scores(hidden, weight, bias, head.softcap, head.scale)
    of_teacher = scores(states, teacher_head.weight, teacher_head.bias, teacher_head.softcap, teacher_head.scale)
    if asked.form == "full":
        of_student, of_teacher = of_student[:, :common], of_teacher[:, :common]
    log_q, log_p = ((logits / asked.temperature).log_softmax(-1) for logits in (of_student, of_teacher))
    if asked.form == "full":
        return plain(log_q, log_p, asked.beta)
    taught = told(asked, states, teacher_head)
    assert isinstance(taught, TaughtTopK)
    log_p = taught.logprobs.double()  # with which their rounding comes: a small rest has few digits
    log_p = torch.cat([log_p, (1 - log_p.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST).log()], 1)
    return plain(with_rest(log_q, taught.ids), log_p, asked.beta)


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert (got - want).abs().max() <= tolerance * want.abs().max()


def compare(
    asked: Divergence, chunk_tokens: int, head: Head, bias: bool, words: tuple[int, int] = (WORDS, WORDS)
) -> None:
    """Value and gradients, with another weight for each token."""
    states, teacher_head = teacher(head, bias, words[1])
    weights, found = torch.linspace(-1, 2, TOKENS), []
    for chunked in (True, False):
        given: Any = student(bias, words[0])
        if chunked:
            value = token_divergence(*given, told(asked, states, teacher_head), head=head, chunk_tokens=chunk_tokens)
            assert value.dtype == torch.float32
        else:
            value = dense(given, asked, states, teacher_head, head)
        (value * weights).sum().backward()
        found.append([value.detach(), *(tensor.grad for tensor in given if tensor is not None)])
    assert (found[0][0] > 0).all()
    for got, want in zip(*found, strict=True):
        close(got, want, 3e-5)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("form", ["top_k", "full"])
@pytest.mark.parametrize("head", HEADS, ids=["plain", "softcap and scale"])
@pytest.mark.parametrize(("chunk_tokens", "temperature", "bias"), [(1, 1.0, False), (4, 0.7, True), (100, 2.0, True)])
def test_chunks_match_the_dense_formula(
    form: DivergenceForm, beta: float, head: Head, chunk_tokens: int, temperature: float, bias: bool
) -> None:
    compare(Divergence(form, beta, 5, temperature), chunk_tokens, head, bias)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("words", [(WORDS, WORDS + 9), (WORDS + 9, WORDS)], ids=["of the teacher", "of the student"])
def test_only_common_words_count_where_one_vocabulary_is_padded(beta: float, words: tuple[int, int]) -> None:
    compare(Divergence("full", beta, 0, 0.7), 4, Head(), True, words)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_more_of_the_teachers_words_approach_the_whole_vocabulary_from_below(beta: float) -> None:
    states, teacher_head = teacher()
    given: Any = student()
    values = []
    for k in (1, 4, 16, WORDS - 1, WORDS, 0):
        asked = Divergence("top_k" if k else "full", beta, k, 2.0)
        values.append(token_divergence(*given, told(asked, states, teacher_head), head=Head(), chunk_tokens=4))
    for fewer, more in pairwise(values[:3]):
        assert (fewer < more).all()
    *_, most, all_words, whole = values
    torch.testing.assert_close(most, whole, rtol=1e-3, atol=1e-4)  # one word makes the class of all others
    torch.testing.assert_close(all_words, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("form", ["top_k", "full"])
def test_a_student_that_equals_its_teacher_has_neither_divergence_nor_gradient(
    form: DivergenceForm, beta: float
) -> None:
    hidden, weight, _ = student()
    assert hidden is not None and weight is not None
    taught = told(Divergence(form, beta, 4, 1.0), hidden.detach(), TeacherHead(weight.detach()))
    value = token_divergence(hidden, weight, None, taught, head=Head(), chunk_tokens=4)
    value.sum().backward()
    assert value.abs().max() < 1e-5
    assert weight.grad is not None and weight.grad.abs().max() < 1e-3


def test_words_of_the_teacher_that_the_student_lacks_are_left_out_of_its_top_k() -> None:
    """By hand: of .5, .25, .125 and a rest of .125, the second word is unknown, so the others are .667, .167, .167; the
    student has .25 for each of four words, of which two make the rest."""
    ids, logprobs = torch.tensor([[1, 4, 2]]), torch.tensor([[0.5, 0.25, 0.125]]).log()
    taught = TaughtTopK(Divergence("top_k", 0.0, 3, 1.0), ids, logprobs)
    hidden, weight = torch.zeros(1, 2, requires_grad=True), torch.randn(4, 2)
    value = token_divergence(hidden, weight, None, taught, head=Head(), chunk_tokens=1)
    p, q = torch.tensor([4 / 6, 1 / 6, 1 / 6]), torch.tensor([0.25, 0.25, 0.5])
    torch.testing.assert_close(value, (p * (p / q).log()).sum()[None])
    value.sum().backward()
    by_logits = torch.tensor([0.25 / 0.5 * (0.5 - 1 / 6), 0.25 - 4 / 6, 0.25 - 1 / 6, 0.25 / 0.5 * (0.5 - 1 / 6)])
    torch.testing.assert_close(hidden.grad, by_logits[None] @ weight)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_certain_teachers_and_students_give_finite_numbers(beta: float) -> None:
    """Logits in the thousands: probabilities of exactly 1 and 0."""
    states, head = teacher()
    for form in ("top_k", "full"):
        asked = Divergence(form, beta, 3, 1.0)  # type: ignore[arg-type]
        hidden, weight, _ = student()
        assert hidden is not None and weight is not None
        taught = told(asked, 1000 * states, head)
        value = token_divergence(hidden * 1000, weight, None, taught, head=Head(), chunk_tokens=4)
        value.sum().backward()
        assert value.isfinite().all() and (value >= 0).all()
        assert weight.grad is not None and weight.grad.isfinite().all()


@pytest.mark.parametrize("form", ["top_k", "full"])
def test_the_block_size_changes_no_more_than_the_last_bits(
    form: DivergenceForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, teacher_head = teacher(HEADS[1])
    found = []
    for numbers in (1 << 30, 1, 3 * WORDS):
        monkeypatch.setattr(logits, "BLOCK_NUMBERS", numbers)
        given: Any = student(True)
        taught = told(Divergence(form, 0.3, 4, 0.7), states, teacher_head)
        value = token_divergence(*given, taught, head=HEADS[1], chunk_tokens=5)
        value.sum().backward()
        found.append([value, *(tensor.grad for tensor in given)])
    for others in found[1:]:
        for one, two in zip(found[0], others, strict=True):
            close(one, two, 1e-6)


@pytest.mark.parametrize(("form", "dtype", "chunks"), [
    ("top_k", torch.float32, 1.35), ("full", torch.float32, 2.35), ("full", torch.bfloat16, 2.6)
])  # fmt: skip
def test_peak_memory_is_little_more_than_a_chunk_of_each_model(
    form: DivergenceForm, dtype: torch.dtype, chunks: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "BLOCK_NUMBERS", 10 * 3000)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 8, generator=generator).to(dtype).requires_grad_() for size in (600, 3000))
    states, matrix = torch.randn(600, 8, generator=generator), torch.randn(3000, 8, generator=generator).to(dtype)
    taught = told(Divergence(form, 0.5, 8, 1.0), states, TeacherHead(matrix))

    def run() -> None:
        token_divergence(hidden, weight, None, taught, head=Head(), chunk_tokens=300).sum().backward()

    run()  # gradients are there from now on
    assert peak_bytes(run, tmp_path / "trace.json") < chunks * 300 * 3000 * 4
