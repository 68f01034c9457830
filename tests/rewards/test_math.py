"""The maths rule: what is right, what is wrong, and that nothing keeps it busy."""

from __future__ import annotations

import json
import signal
import time

import pytest

from hpcrl.config import RewardConfig
from hpcrl.rewards import math
from hpcrl.rewards.base import RewardItem
from hpcrl.rewards.math import MathReward, equivalent, final_answer, gold_answer, is_explosive

RIGHT = [  # (given, gold)
    ("42", "42"), ("42.", "42"), ("+5", "5"), ("-0", "0"), ("5.0", "5"), ("$18", "18"), (r"\$18.00", "18"),
    ("1,000", "1000"), ("1{,}000", "1000"), ("1 000", "1000"), ("-1,234.5", "-1234.5"), ("1.5e3", "1500"),
    (r"1.5\times 10^3", "1500"), ("50%", "50"), (r"50\%", "50"), (r"90^\circ", "90"), ("18 dollars", "18"),
    ("72 clips per day.", "72"), (r"5\text{ cm}", "5"), (r"\frac{1}{2}", "0.5"), (r"\frac12", "1/2"), ("1/2", ".5"),
    (r"\dfrac{3}{4}", r"\frac{3}{4}"), (r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"2\frac{1}{2}", "5/2"),
    (r"0.\overline{3}", "1/3"), (r"0.1\overline{6}", r"\frac{1}{6}"), (r"\sqrt{8}", r"2\sqrt{2}"), ("10^{3}", "1000"),
    (r"\binom{5}{2}", "10"), ("5!", "120"), (r"\log_2 8", "3"), ("x^2+2x+1", "(x+1)^2"), ("b+a", "a+b"),
    ("x=5", "5"), ("5", "x=5"), ("y=2x+1", "2x+1"), ("1,2,3", "3,2,1"), (r"\{2,1\}", r"\{1,2\}"), (r"\pm 2", "2,-2"),
    ("x=1,x=2", "1,2"), (r"x<3", r"(-\infty,3)"), (r"(-\infty,3)", "x<3"), (r"1\le x\le 3", "[1,3]"),
    ("[1,3]", r"1\le x\le 3"), (r"x\in[1,3]", "[1,3]"), (r"\emptyset", r"\{\}"), (r"\infty", r"\infty"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"), (r"\text{even}", "even"),
    ("True", r"\text{True}"), ("Monday", "monday"), (r"\text{(A)}", "A"), ("(A)", "A"), ("B", r"\text{B}"),
    (r"\text{no solution}", "No solution"), (r"\left(1, 2\right)", "(1,2)"),
]  # fmt: skip
WRONG = [
    ("41", "42"), ("-5", "5"), ("99", "100"), ("1e400", "1"), ("", "0"), ("0.333", "1/3"), ("3.14", r"\pi"),
    (r"-\infty", r"\infty"), ("[1,2)", "[1,2]"), ("x<3", r"(-\infty,3]"), ("(3,2)", "(2,3)"), ("1,2", "1,2,3"),
    ("silent", "listen"), ("odd", r"\text{even}"), ("C", "B"), (r"\text{False}", "True"), ("0", r"0.\overline{3}"),
    ("3 million", "3"), ("3 or 4", "3"), ("x^2+2x", "(x+1)^2"), (r"\sqrt{3}", r"\sqrt{2}"), ("1/0", "0"),
    ("100, 200", "100,200"),
]  # fmt: skip
HOSTILE = [
    "9^{9^{9^9}}", "9^9^9^9", "10000000!", "(10000000)!", "10!!!", "2^{100000}", "(" * 3000 + "1" + ")" * 3000,
    "{" * 100 + "1" + "}" * 100, r"\sum_{i=1}^{100000000}i", "9" * 5000, r"\frac{1}{" * 100 + "1" + "}" * 100,
    r"\boxed{" * 1000, "1" + "+1" * 2000, r"\int_0^1 " * 30 + "x", "(x+y+z)^{999}", "\\" * 300, "\x00", "𝟙𝟚",
]  # fmt: skip


@pytest.fixture(scope="module")
def reward() -> MathReward:
    return MathReward(RewardConfig(name="math"))


def score(reward: MathReward, response: str, answer: object) -> float:
    (result,) = reward.score([RewardItem(0, "d", "p", response, answer)])
    assert result.reward == result.score
    return result.score


@pytest.mark.parametrize(("given", "gold"), RIGHT)
def test_equal(reward: MathReward, given: str, gold: str):
    assert score(reward, f"So it is \\boxed{{{given}}}.", gold) == 1


@pytest.mark.parametrize(("given", "gold"), WRONG)
def test_different(reward: MathReward, given: str, gold: str):
    assert score(reward, f"So it is \\boxed{{{given}}}.", gold) == 0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} \boxed{", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed 7.", "7"),
        (r"<think>\boxed{9}</think>\boxed{8}", "8"),
        (r"\boxed{9}</think>It is 8. #### 8", "8"),
        (r"<think>\boxed{9}", None),
        ("First 3.\n#### 1,234 \nbye", "1,234"),
        ("The answer is 3. No, the final answer is: 4 apples", "4 apples"),
        ("Long story.\n\n12\n", "12"),
        ("", None),
    ],
)
def test_where_the_answer_stands(response: str, answer: str | None):
    assert final_answer(response) == answer


def test_only_a_box_counts_where_it_is_required():
    strict = MathReward(RewardConfig(name="math", options={"require_boxed": True}))
    assert score(strict, "#### 4", "4") == 0 and score(strict, r"\boxed{4}", "4") == 1


@pytest.mark.parametrize(
    ("answer", "final"), [("5+5=10\n#### 10", "10"), (r"so \boxed{1} or \boxed{x^2}", "x^2"), (" 7 ", "7")]
)
def test_gold_answers(answer: str, final: str):
    assert gold_answer(answer) == final


def test_several_boxes_are_not_pooled(reward: MathReward):
    assert score(reward, r"\boxed{1} \boxed{2} \boxed{3}", "2") == 0


def test_numbers_as_json_and_rows_without_an_answer(reward: MathReward):
    assert score(reward, r"\boxed{4.0}", 4) == 1 and score(reward, r"\boxed{1/2}", 0.5) == 1
    with pytest.raises(ValueError, match="no answer to compare with"):
        score(reward, r"\boxed{4}", None)


@pytest.mark.parametrize("given", HOSTILE)
def test_hostile_answers_are_wrong_within_the_limit(reward: MathReward, given: str):
    start = time.process_time()
    for response in (given, f"\\boxed{{{given}}}"):
        assert score(reward, response, "1234567") == 0
    assert time.process_time() - start < 5


def test_the_limit_holds_where_its_alarm_is_caught():
    rung = []

    def stubborn() -> str:
        while len(rung) < 2:
            try:
                time.sleep(60)
            except BaseException as error:  # as sympy does in some places
                rung.append(error)
        time.sleep(60)
        return "ended by itself"

    left_s = signal.getitimer(signal.ITIMER_REAL)[0]  # of this test's own limit
    start = time.monotonic()
    assert math._within_limit(stubborn, "stopped") == "stopped" and len(rung) == 2
    assert math._within_limit(lambda: "in time", "stopped") == "in time"
    took_s = time.monotonic() - start
    assert 3 * math.SOFT_LIMIT_S <= took_s < 20
    assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(left_s - took_s, abs=1), "it goes on as before"


def test_explosive_text_is_told_from_ordinary_mathematics():
    assert all(map(is_explosive, ("9^{9^9}", "2^{12345}", "(9999)!", "3!!", "(" * 30)))
    assert not any(map(is_explosive, ("e^{x^2}", "2^{2024}", "10!", r"\frac{\sqrt{3}}{2}", "x^{10}+y^2")))
    assert equivalent("9^{9^9}", "9^{9^9}"), "equal text is equal even there"


def test_gsm8k_gold_answers_are_right(reward: MathReward, shared_data):
    lines = (shared_data / "gsm8k" / "test.jsonl").read_text().splitlines()[:400]
    golds = [json.loads(line)["answer"] for line in lines]
    assert sum(score(reward, gold, gold) for gold in golds) == 400
    boxed = [rf"<think>\boxed{{0.5}}</think>\boxed{{{gold_answer(gold)}}}" for gold in golds]
    assert sum(map(score, [reward] * 400, boxed, golds)) == 400
    shifted = golds[1:] + golds[:1]
    same = sum(gold_answer(a) == gold_answer(b) for a, b in zip(golds, shifted, strict=True))
    assert sum(map(score, [reward] * 400, shifted, golds)) == same < 20
