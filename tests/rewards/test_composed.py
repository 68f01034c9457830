"""Format rewards, and composed rewards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hpcrl.config import RewardConfig
from hpcrl.rewards.reward import ModelTurn, Reward, RewardItem, Score, make_reward
from hpcrl.rewards.services import Services
from hpcrl.rewards.serving.guarded import score_each_async
from tests.rewards.test_judge import Server


def make(name: str, **options: Any) -> Reward:
    return make_reward(RewardConfig(name=name, options=options))


def score(reward: Reward, response: str, answer: Any = None, **fields: Any) -> Score:
    (scored,) = reward.score([RewardItem(0, "d", fields.pop("prompt", "p"), response, answer, **fields)])  # type: ignore[misc]
    return scored


@pytest.mark.parametrize(("num_tokens", "reward"), [(0, 0), (60, 0), (61, -0.025), (80, -0.5), (100, -1), (200, -1)])
def test_length_rewards(num_tokens: int, reward: float) -> None:
    length = make("length", max_tokens=100, buffer_tokens=40)
    scored = score(length, "x", token_ids=range(num_tokens))
    assert (scored.reward, scored.score) == (pytest.approx(reward), float(reward == 0))
    assert score(length, "x", token_ids=range(30), earlier=[ModelTurn("y", range(50))]).reward == pytest.approx(-0.5)
    with pytest.raises(ValueError, match="buffer_tokens=200 is above max_tokens=100"):
        make("length", max_tokens=100, buffer_tokens=200)


def test_repetition_penalty() -> None:
    repetition = make("repetition")
    assert score(repetition, "a b c d").reward == 0 and score(repetition, "").reward == 0
    assert score(repetition, "a b c A b c").reward == pytest.approx(-0.25)  # abc bca cab abc
    assert score(repetition, "no no no no").reward == pytest.approx(-0.5)
    assert score(make("repetition", ngram=1), "no no no no").reward == pytest.approx(-0.75)


@pytest.mark.parametrize(
    ("response", "options", "right"),
    [
        ("<think>a</think>b", {}, 1),
        (" <think>\na\n</think>\n\nb ", {}, 1),
        ("<think>a</think>", {}, 0),
        ("<think>a</think>", {"answer_after": False}, 1),
        ("<think> </think>b", {}, 0),
        ("x<think>a</think>b", {}, 0),
        ("<think>a", {}, 0),
        ("<think>a<think>b</think>c", {}, 0),
        ("<think>a</think>b</think>c", {}, 0),
        (
            "<think>a <answer>x</answer></think><answer>y</answer>",
            {"tags": ["think", "answer"], "answer_after": False},
            0,
        ),
        ("<think>a</think><answer>b</answer>", {"tags": ["think", "answer"], "answer_after": False}, 1),
        ("<think>a</think> so <answer>b</answer>", {"tags": ["think", "answer"], "answer_after": False}, 0),
        ("<answer>b</answer><think>a</think>", {"tags": ["think", "answer"], "answer_after": False}, 0),
    ],
)
def test_required_tags(response: str, options: dict[str, Any], right: int) -> None:
    assert score(make("tags", **options), response).reward == right


@pytest.mark.slow
def test_language() -> None:
    english, french = "The cat sleeps on the chair in the garden.", "Le chat dort sur la chaise dans le jardin."
    assert score(make("language"), english, prompt=english).reward == 1
    assert score(make("language"), french, prompt=english).reward == 0
    assert score(make("language", language="fr"), french, prompt=english).reward == 1
    assert score(make("language"), f"<think>{french}</think>{english}", prompt=english).reward == 1
    for wordless in ("", "$x = 3$", "42 42", "\U0001f600"):
        assert score(make("language", language="fr"), wordless).reward == 0, wordless
        assert score(make("language"), wordless, prompt=english).reward == 0, wordless
    assert score(make("language"), "42", prompt="6 * 7").reward == 1, "a prompt without words requires no language"
    assert score(make("language", language="zh"), "\u732b\u5728\u82b1\u56ed\u91cc\u7761\u89c9").reward == 1


RIGHT, SHORT = {"name": "exact_match"}, {"name": "length", "options": {"max_tokens": 10, "buffer_tokens": 10}}


def test_a_weighted_sum_of_rewards() -> None:
    reward = make("composed", parts={"right": RIGHT | {"weight": 2}, "short": SHORT | {"weight": 0.5}})
    scored = score(reward, "Paris", "paris", token_ids=range(5))
    assert (scored.reward, scored.score) == (pytest.approx(2 - 0.25), 1.0)
    assert scored.metrics == {"right": 1.0, "short": -0.5} and scored.ground_truth == "paris"
    assert score(reward, "Rome", "paris", token_ids=range(5)).score == 0.0
    assert reward.inline


def test_a_product_and_a_gated_sum_of_rewards() -> None:
    parts = {"right": RIGHT, "tags": {"name": "tags"}}
    both, form, neither = "<think>a</think>paris", "<think>a</think>rome", "rome"
    product = make("composed", parts=parts, rule="product")
    assert [score(product, text, "paris").reward for text in (both, form, neither, "paris")] == [1, 0, 0, 0]
    gated = {"right": RIGHT, "tags": {"name": "tags", "gate": True, "weight": 0.25}}
    gate = make("composed", parts=gated, rule="gate", closed=-1)
    assert [score(gate, text, "paris").reward for text in (both, form, neither, "paris")] == [1.25, 0.25, -1, -1]


def test_scores_of_parts_are_metrics_and_errors_name_their_part() -> None:
    numbers = make("composed", parts={"number": {"name": "numeric"}})
    assert score(numbers, "none", 3).metrics == {"number/no_answer": 1.0, "number": 0.0}
    assert numbers.problem_of_row("many", {}).startswith("part number (numeric): the answer 'many' has no number")
    assert "which the part number (numeric) compares with" in numbers.problem_of_row(None, {})
    assert numbers.problem_of_row(4, {}) == ""
    assert not make("composed", parts={"right": {"name": "math"}}).inline


def test_a_part_can_wait_for_a_service() -> None:
    """A judge's vote and a locally computed part; without the judge, the response has an error."""
    answers = iter(["9", "nothing"])

    def reply(body: dict[str, Any], number: int) -> str:
        line = str(body["messages"][-1]["content"].splitlines()[-1]).removesuffix("V")
        return line + "5" if next(answers) == "9" else "I cannot say"

    server = Server(reply)
    try:
        parts = {"right": RIGHT, "judge": {"name": "judge", "weight": 0.5, "options": {"judges": {"j": server.judge}}}}
        reward = make_reward(RewardConfig(name="composed", options={"parts": parts}, timeout_s=20))
        assert reward.pool == "async" and not reward.inline
        items = [RewardItem(n, "d", "p", "4", "4") for n in range(2)]
        judged, unjudged = (asyncio.run(score_each_async(reward, [item], 20.0)) for item in items)
    finally:
        server.close()
    assert judged is not None and unjudged is not None
    assert (judged[0].reward, judged[0].score, judged[0].metrics["judge"]) == (1.25, 1.0, 0.5)
    assert unjudged[0].error == "judge: j: no verdict in its answer" and unjudged[0].metrics["judge/unparsable"] == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "parts: missing"),
        ({"parts": {}}, "parts: .* at least 1"),
        ({"parts": {"a": {"name": "mathz"}}}, "parts.a.name: 'mathz' cannot be a part; these can: exact_match, "),
        ({"parts": {"a": {"name": "function"}}}, "parts.a.name: 'function' cannot be a part"),
        ({"parts": {"a": {"name": "composed"}}}, "parts.a.name: 'composed' cannot be a part"),
        ({"parts": {"a": {"name": "tags", "options": {"tag": 1}}}}, "parts.a.options: there is no option 'tag'"),
        ({"parts": {"a": RIGHT | {"wait": 1}}}, "there is no option 'parts.a.wait'"),
        ({"parts": {"a": RIGHT}, "rule": "gate"}, "gate needs a part with gate=true; there are a"),
        ({"parts": {"a": RIGHT | {"gate": True}}}, "parts.a.gate: not read with rule=sum, only with gate"),
        ({"parts": {"a": RIGHT | {"weight": 2}}, "rule": "product"}, "parts.a.weight: not read with rule=product"),
    ],
)
def test_invalid_options_are_reported_before_the_start(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make("composed", **options)


def test_a_part_can_require_ranks_of_the_run() -> None:
    reward = make("composed", parts={"own": {"name": "judge", "options": {"judges": {"one": {"role": "judge"}}}}})
    with pytest.raises(
        ValueError, match=r"^parts\.own: the reward needs ranks of the role judge, which only a run has"
    ):
        reward.start()
    reward.connect(Services(urls={"judge": ["http://10.0.0.1:80"]}))
    reward.start()
