"""Sampling of the native generator: streams of uniforms, truncation, inverse CDF, stop strings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hpcrl.engines.gen import sampling
from hpcrl.engines.gen.sampling import GOLDEN, SamplingPlan, mix64, sample, stream_origin, truncate, uniforms
from hpcrl.engines.gen.stops import StopStrings
from hpcrl.engines.tiny import make_tokenizer

pytestmark = pytest.mark.numerics

CPU = torch.device("cpu")


def plan_of(rows: list[dict[str, float]], vocab: int) -> SamplingPlan:
    def column(name: str, off: float, dtype: type) -> np.ndarray:
        return np.array([row.get(name, off) for row in rows], dtype=dtype)

    return SamplingPlan.build(
        temperature=column("temperature", 1, np.float64),
        top_k=column("top_k", 0, np.int64),
        top_p=column("top_p", 1, np.float64),
        min_p=column("min_p", 0, np.float64),
        num_live=len(rows),
        vocab_size=vocab,
        device=CPU,
    )


@pytest.fixture(params=["floats", "units"])
def summands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The number type for sums of probabilities: on the CPU, and on devices that add in no fixed order."""
    monkeypatch.setattr(sampling, "adds_in_order", lambda device: request.param == "floats")
    return request.param


def test_integer_units_draw_the_same_tokens_as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for uniforms within rounding of a boundary. Sums of integer units have no rounding, unlike sums of
    floats."""
    probs = (torch.randn(4000, 500, generator=torch.Generator().manual_seed(0)) * 2).softmax(-1)
    uniform = torch.from_numpy(uniforms(np.array([stream_origin(s, 0) for s in range(4000)]), 0))
    plan = plan_of([{}, {"top_p": 0.9, "top_k": 100}] * 2000, 500)
    found, sums = [], []
    for in_order in (True, False):
        monkeypatch.setattr(sampling, "adds_in_order", lambda device, in_order=in_order: in_order)
        found.append(sample(probs.log(), plan, uniform))
        numbers = sampling.in_units(probs)
        sums.append([numbers.cumsum(-1)[:, -1], numbers[:, ::2].sum(-1) + numbers[:, 1::2].sum(-1)])
    same = found[0][0] == found[1][0]
    assert same.float().mean() > 0.999
    for floats, units in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(floats[same], units[same], atol=1e-5, rtol=0)
    assert torch.equal(*sums[1]) and not torch.equal(*sums[0])


def test_mix64_is_splitmix64() -> None:
    # The first outputs of the reference implementation from state 0.
    states = np.arange(1, 4, dtype=np.uint64) * GOLDEN
    assert [hex(x) for x in mix64(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_a_stream_depends_only_on_seed_and_index() -> None:
    early = [uniforms(np.array([stream_origin(11, 0)]), i)[0] for i in range(5)]
    late = [uniforms(np.array([stream_origin(11, 1000)]), 1000 + i)[0] for i in range(5)]
    assert early == late
    assert early != [uniforms(np.array([stream_origin(12, 0)]), i)[0] for i in range(5)]


def test_streams_are_uniform_and_unrelated() -> None:
    """20,000 streams of neighbouring seeds: means, variances and correlations within five standard errors."""
    origins = np.array([stream_origin(seed, 0) for seed in range(20_000)])
    draws = np.stack([uniforms(origins, i) for i in range(8)]).astype(np.float64)
    assert draws.min() >= 0 and draws.max() < 1
    error = 5 / math.sqrt(20_000)
    assert abs(draws.mean(axis=1) - 0.5).max() < error / math.sqrt(12)
    assert abs(draws.var(axis=1) - 1 / 12).max() < error / 12
    assert abs(np.corrcoef(draws) - np.eye(8)).max() < error  # one index against another
    assert abs(np.corrcoef(draws[0, :-1], draws[0, 1:])[0, 1]) < error  # one seed against the next


def test_the_largest_uniform_stays_below_any_total() -> None:
    largest = np.float32(2**24 - 1) * np.float32((1 - 2.0**-22) * 2.0**-24)
    totals = np.concatenate(
        [np.nextafter(np.float32(1), np.float32(x)) * np.float32(2.0**e) for x in (0, 1, 2) for e in (-3, 0, 2)],
        axis=None,
    )
    assert (largest * totals < totals).all()


@pytest.mark.usefixtures("summands")
def test_inverse_cdf_by_hand() -> None:
    probs = torch.tensor([0.1, 0.0, 0.4, 0.5])
    draws = [0.0, 0.09, 0.11, 0.49, 0.51, 0.99]
    logits = probs.log().repeat(len(draws), 1)
    ids, logprobs, behaviour = sample(logits, plan_of([{}] * len(draws), 4), torch.tensor(draws))
    assert ids.tolist() == [0, 0, 2, 2, 3, 3] and behaviour is logprobs
    torch.testing.assert_close(logprobs, probs[ids].log())


@pytest.mark.usefixtures("summands")
def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf], [-math.inf, 0.0, -math.inf]])
    largest = float(np.float32(2**24 - 1) * np.float32((1 - 2.0**-22) * 2.0**-24))
    ids, *_ = sample(logits, plan_of([{}, {}], 3), torch.tensor([0.0, largest]))
    assert ids.tolist() == [1, 1]


@pytest.mark.usefixtures("summands")
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [0, 0.5, 0.2, 0, 0]),
        ({"top_p": 0.7}, [0, 0.5, 0.2, 0, 0]),  # .5 + .2 reach .7: the third is not needed
        ({"top_p": 0.71}, [0, 0.5, 0.2, 0.15, 0]),
        ({"top_p": 0.01}, [0, 0.5, 0, 0, 0]),
        ({"min_p": 0.35}, [0, 0.5, 0.2, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [0, 0.5, 0.2, 0, 0]),  # of .85 left, .5 + .2 are .82
        ({"top_k": 4, "top_p": 0.8, "min_p": 0.35}, [0, 0.5, 0.2, 0, 0]),
        ({"top_k": 99}, [0.1, 0.5, 0.2, 0.15, 0.05]),
    ],
)
def test_truncation_by_hand(params: dict[str, float], kept: list[float]) -> None:
    probs = torch.tensor([[0.1, 0.5, 0.2, 0.15, 0.05]], dtype=torch.float32)
    plan = plan_of([params], 5)
    torch.testing.assert_close(truncate(probs, plan.top_k, plan.top_p, plan.min_p), torch.tensor([kept]))


@pytest.mark.usefixtures("summands")
@pytest.mark.parametrize(("top_p", "kept"), [(1.0, 3), (0.999, 1)])
def test_top_p_of_1_keeps_all_tokens_even_if_the_sum_rounds_to_1(top_p: float, kept: int) -> None:
    probs = torch.tensor([[1.0, 1e-9, 1e-12, 0.0]])  # their sum in float32 is 1 from the first token on
    plan = plan_of([{"top_k": 3, "top_p": top_p}], 4)
    found = truncate(probs, plan.top_k, plan.top_p, plan.min_p)
    assert torch.equal(found[0, :kept], probs[0, :kept]) and not found[0, kept:].any()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.3, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 7, 300, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.4]),
)
def test_truncation_matches_transformers(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    assume(top_k or top_p < 1 or min_p)
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(seed))
    plan = plan_of([{"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}] * 2, 1000)
    mine = truncate((logits / temperature).softmax(-1), plan.top_k, plan.top_p, plan.min_p)
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    scores = (
        MinPLogitsWarper(min_p)(None, TopPLogitsWarper(top_p)(None, scores))
        if min_p
        else TopPLogitsWarper(top_p)(None, scores)
    )
    # A cumulative sum that meets top_p within rounding may fall to either side.
    theirs = scores.softmax(-1)
    assert ((mine > 0) != (theirs > 0)).sum() <= 2
    torch.testing.assert_close(mine / mine.sum(-1, keepdim=True), theirs, atol=2e-3, rtol=0)


@pytest.mark.usefixtures("summands")
def test_ties_with_the_last_kept_token_are_kept() -> None:
    probs = torch.tensor([[0.2, 0.3, 0.2, 0.2, 0.1]])
    plan = plan_of([{"top_k": 2}], 5)
    torch.testing.assert_close(
        truncate(probs, plan.top_k, plan.top_p, plan.min_p), torch.tensor([[0.2, 0.3, 0.2, 0.2, 0]])
    )


@pytest.mark.usefixtures("summands")
def test_token_frequencies_follow_the_truncated_distribution() -> None:
    """Chi-square of 40,000 draws; the negative control, the untruncated distribution, is far off."""
    count, vocab = 40_000, 12
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    params = {"temperature": 0.8, "top_p": 0.9}
    probs = (logits / 0.8).softmax(-1)
    plan = plan_of([params], vocab)
    kept = truncate(probs, plan.top_k, plan.top_p, plan.min_p)[0]
    uniform = uniforms(np.array([stream_origin(s, 0) for s in range(count)]), 0)
    ids, logprobs, behaviour = sample(
        logits.repeat(count, 1), plan_of([params] * count, vocab), torch.from_numpy(uniform)
    )
    seen = ids.bincount(minlength=vocab).double()
    assert 2 <= (kept > 0).sum() < vocab and (seen[kept == 0] == 0).all()
    torch.testing.assert_close(logprobs, probs[0, ids].log(), atol=1e-5, rtol=0)
    torch.testing.assert_close(behaviour, (kept / kept.sum())[ids].log(), atol=1e-5, rtol=0)

    def chi_square(expected: torch.Tensor) -> float:
        used = expected > 0
        return float((((seen - expected) ** 2)[used] / expected[used]).sum())

    limit = vocab + 5 * math.sqrt(2 * vocab)
    assert chi_square((kept / kept.sum()).double() * count) < limit < chi_square(probs[0].double() * count)


@pytest.mark.usefixtures("summands")
def test_sampling_of_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 500, generator=generator)
    uniform = torch.rand(64, generator=generator)
    plain = sample(logits.clone(), plan_of([{}] * 64, 500), uniform)
    neighbours = [{"top_k": 300}, {"temperature": 0.0}, {"temperature": 0.5, "top_p": 0.3}]
    rows = [{} if i % 2 else neighbours[i // 2 % 3] for i in range(64)]
    mixed = sample(logits.clone(), plan_of(rows, 500), uniform)
    assert torch.equal(plain[0][1::2], mixed[0][1::2]) and torch.equal(plain[1][1::2], mixed[1][1::2])
    assert not torch.equal(plain[0][::2], mixed[0][::2])
    greedy = [i for i in range(64) if rows[i].get("temperature") == 0.0]
    assert torch.equal(mixed[0][greedy], logits[greedy].argmax(-1))
    torch.testing.assert_close(mixed[1][greedy], logits[greedy].log_softmax(-1).amax(-1))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(320))


@pytest.mark.parametrize("stop", [("apples",), ("x", "\n\n"), ("é",), ("½ 日本",), ("<|im_end|>",), (" of the",)])
def test_a_stop_string_is_found_at_the_first_token_that_completes_it(
    tokenizer: PreTrainedTokenizerFast, stop: tuple[str, ...]
) -> None:
    """Against decoding the whole response after every token."""
    text = f"We pick 12 apple of th {stop[0][:-1]} caf\u00e8 \u00bd {stop[0]} and more {stop[-1]}{stop[0]}"
    ids = tokenizer.encode(text)
    expected = next(n for n in range(1, len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in stop))
    stops = StopStrings(tokenizer, 400)
    closers, window = stops.closers(stop), stops.window(stop)
    found = next(
        n for n in range(1, len(ids) + 1) if closers[ids[n - 1]] and stops.completes(stop, ids[max(0, n - window) : n])
    )
    assert found == expected
    assert closers.shape == (400,) and not closers[320:].any() and closers.mean() < 0.75
