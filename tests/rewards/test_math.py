"""The math reward: right and wrong answers, and that no answer takes long."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.config import RewardConfig
from hpcrl.rewards.builtin.math import MathReward
from hpcrl.rewards.grading import equality
from hpcrl.rewards.grading.equality import MAX_DEPTH, equivalent, is_explosive, within_limit
from hpcrl.rewards.grading.extract import final_answer, gold_answer
from hpcrl.rewards.reward import RewardItem

DOCUMENT = Path(__file__).parents[2] / "docs" / "rewards.md"
RIGHT = [  # (given, gold)
    ("42", "42"), ("42.", "42"), ("+5", "5"), ("-0", "0"), ("5.0", "5"), ("$18", "18"), (r"\$18.00", "18"),
    ("1,000", "1000"), ("1{,}000", "1000"), ("1 000", "1000"), ("-1,234.5", "-1234.5"), ("1.5e3", "1500"),
    (r"1.5\times 10^3", "1500"), ("50%", "50"), (r"50\%", "50"), (r"90^\circ", "90"), ("18 dollars", "18"),
    ("72 clips per day.", "72"), (r"5\text{ cm}", "5"), (r"\frac{1}{2}", "0.5"), (r"\frac12", "1/2"), ("1/2", ".5"),
    (r"\dfrac{3}{4}", r"\frac{3}{4}"), (r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"2\frac{1}{2}", "5/2"),
    (r"0.\overline{3}", "1/3"), (r"0.1\overline{6}", r"\frac{1}{6}"), (r"\sqrt{8}", r"2\sqrt{2}"), ("10^{3}", "1000"),
    ("x^2+2x+1", "(x+1)^2"), ("b+a", "a+b"),
    ("x=5", "5"), ("5", "x=5"), (r"x\in\{5\}", "5"), ("y=2x+1", "2x+1"), ("1,2,3", "3,2,1"),
    (r"\{2,1\}", r"\{1,2\}"), (r"\pm 2", "2,-2"),
    ("x=1,x=2", "1,2"), (r"x<3", r"(-\infty,3)"), (r"(-\infty,3)", "x<3"), (r"1\le x\le 3", "[1,3]"),
    ("[1,3]", r"1\le x\le 3"), (r"x\in[1,3]", "[1,3]"), (r"\emptyset", r"\{\}"), (r"\infty", r"\infty"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"), (r"\text{even}", "even"),
    ("True", r"\text{True}"), ("Monday", "monday"), (r"\text{(A)}", "A"), ("(A)", "A"), ("B", r"\text{B}"),
    (r"\text{no solution}", "No solution"), (r"\left(1, 2\right)", "(1,2)"),
    (r"18\text{ km}^2", "18"), ("18km", "18"), ("18 m/s^2", "18"), ("approximately 42", "42"), ("-2 1/2", "-5/2"),
    ("2½", "2.5"), ("2√3", r"2\sqrt{3}"), (r"11,\! 111,\! 100", "11111100"), (r"14 {, }916", "14916"),
    (r"\frac{-3}{4}", "-.75"), (r"\\frac{3}{4}", ".75"), ("42 = x", "42"), ("(x,y)=(5,8)", "(5, 8)"),
    ("(1,2),(2,1)", "(2, 1), (1, 2)"), (r"(7,11),\ (11,7)", "(11,7)or(7,11)"), (r"S_{ABC}:S=7:32", "7:32"),
    ("4x+6y=12", "2x+3y=6"), ("B. 42", "(B)"), ("(B) 42", "(B) 42"), (r"\langle 1,2\rangle", "(1,2)"), ("3xy", "3yx"),
    (r"125\textnormal{ miles}", "125"), ("5 dollars", "5 dollar"), ("(1,1)", "(1, 1)"), ("1,1,2", "2,1"),
    ("x=2", "x=2.0"), ("$5 and $18", "18, 5"), ("75 percent", ".75"), ("42_{10}", "42"),
    (r"2\pi m", r"2\pi"), (r"36\pi\text{ kg}", r"36\pi"), (r"x\text{ cm}", "x"),
    (r"50 \frac{\text{m}}{\text{s}^2}", "50 m/s^2"), ("2h", "2"), ("20s", "20"), ("15g", "15"), ("10m", "10"),
    (r"30\text{ min}", "30"), ("30 mins", "30"), (r"6\pi\text{ in}^2", r"6\pi"), (r"2\pi\text{ meters}", r"2\pi"),
    (r"2\sqrt3\text{ units}", r"2\sqrt3"), (r"12\pi\text{ square units}", r"12\pi"), ("$12 an hour", "12"),
    ("$12/hour", "12 per hour"), (r"100\text{ N}", "100"), (r"5\text{ V}", "5"), (r"5\text{ m}/\text{s}", "5"),
    ("5 kg m/s", "5"), ("2 m", "2m"), (r"\frac{1}{2} mg", r"\frac{mg}{2}"), (r"\sqrt{3} m", r"m\sqrt{3}"),
    ("2st", "2ts"), (r"2\text{ cm}, 3\text{ cm}", "2,3"), (r"\sqrt{8}\text{ cm}", r"2\sqrt{2}\text{ cm}"),
    ("18m/s", "18"), ("5 gms", "5"), ("1,000.99m²", "1000.99"),
    ("x=1,234", "1234"), ("0,111", "0.111"), (".75", r"75\%"), ("€18", "18"), ("18 km/h", "18"),
    (r"2\pi\text{ m}", r"2\pi"), ("30 min", "30"), ("√2", r"\sqrt{2}"), ("∞", r"\infty"), ("10³", "1000"),
    ("2abc", "2cba"), (r"\left(10, 200\right)", "(10,200)"), ("3,2,1", "1,2,3"), ("n=2, k=45", "k=45, n=2"),
    ("B", r"\text{(B)}"),
    (r"\leq 5", r"\le 5"), (r"\ge 5", r"\geq 5"), (r"\neq 5", r"\ne 5"), (r"\leq5", r"\leq 5"), ("≥ 5", r"\geq 5"),
    ("≤ 5", r"\leqslant 5"), ("≠ 5", r"\neq 5"), ("<= 5", "≤5"), ("x>=5", r"x\ge5"), ("2 pi r", r"2\pi r"),
    ("α", r"\alpha"), ("2θ", r"\theta\cdot 2"), ("x∈ℝ", r"\mathbb{R}"), ("ℝ", r"(-\infty,\infty)"), ("x^½", "x^{1/2}"),
    (r"US\$18", "18"), ("18", "US$18"), ("18¢", "18"), ("₩18", "18"), ("5\u2126", r"5\Omega"),
    ("18个苹果", "18"), ("18 元", "18"), ("5。", "5"), ("18です", "18"),
]  # fmt: skip
WRONG = [
    ("41", "42"), ("-5", "5"), ("99", "100"), ("1e400", "1"), ("", "0"), ("0.333", "1/3"), ("3.14", r"\pi"),
    (r"-\infty", r"\infty"), ("[1,2)", "[1,2]"), ("x<3", r"(-\infty,3]"), ("(3,2)", "(2,3)"), ("1,2", "1,2,3"),
    ("silent", "listen"), ("odd", r"\text{even}"), ("C", "B"), (r"\text{False}", "True"), ("0", r"0.\overline{3}"),
    ("3 million", "3"), ("3 or 4", "3"), ("x^2+2x", "(x+1)^2"), (r"\sqrt{3}", r"\sqrt{2}"), ("1/0", "0"),
    ("100, 200", "100,200"),
    ("43\n42", "42"), ("42", "42_8"), ("2 1/2", "21/2"), ("42 to 43", "42"), (r"43 \Rightarrow 42", "42"),
    ("-42", "42"),
    (r"43 \approx 42", "42"), (r"42\\43", "42"), (r"\not 42", "42"), ("--42", "42"), ("42'", "42"), ("42..", "42"),
    ("42)", "42"), ("42(", "42"), (r"42\cdot!", "42"), (r"42\approx", "42"), ("42|43", "42"), (r"42 \pm 1", "42"),
    ("x=42=43", "42"), ("42=43", "42"), ("x=2,y=1", "1,2x"), ("2,1", "x=1,y=2"), ("x=5", "y=5"), ("[1,2]", "(1,2)"),
    ("C) 42", "B"), ("A and B", "B"), ("no", "on"), ("act", "cat"), ("42k", "42"), ("42 5", "425"), ("1,00", "100"),
    ("1 000 1", "10001"), ("1000 000", "1000000"), ("5 pi", "5"), ("5 pi", "5 cm"), ("42 mod 5", "42"),
    ("5 yes no", "5"),
    (r"42\text{ million}", "42"), ("-[0,1)", "1"), (r"\angle BAC", r"\angle ABC"), ("1,1", "(1,2)"), ("(1,1)", "(1)"),
    ("75%", "0.0075"), ("0.005", "50%"), ("x", "y"), (r"\sqrt{x}=5", "5"), ("12,34", "1234"), ("x_1=2", "x_2=2"),
    (r"\frac13\pi r^2 h", r"\frac13\pi r^2"), ("(a+b) h", "a+b"), ("x^2 m", "x^2"), ("f(x) g", "f(x)"),
    (r"\frac{F}{m} s", r"\frac{F}{m}"), (r"\frac{1}{2} m g h", r"\frac12"), ("2 mg h", "2"), ("x^2st", "x^2"),
    ("(x+y)pt", "x+y"), (r"\frac{a}{b} ml", r"\frac{a}{b}"), ("2", "2m"), ("5 ms", "5 m"), ("10M", "10"),
    ("12/st", "12"), ("12/dozen", "12"), ("12/hour", "12 hours"), (r"x\text{ even}", "x"),
    (r"\sqrt{3} rst", r"\sqrt{3}"), (r"2\pi\text{ hundred}", r"2\pi"), (r"2\pi\text{ m}", r"2\pi\text{ cm}"),
    ("2 mgh", "2"), ("4s^2", "4"),
    ("3 millions", "3"), ("42 dozens", "42"), ("42 tenths", "42"), ("42 squared", "42"), ("42 no", "42"), ("CA", "AC"),
    (r"\leq 42", "42"), ("x=43=42", "42"),
    (r"\leq 5", r"\geq 5"), ("≠5", "5"), ("α", "β"), ("α", "a"), ("∛8", r"\sqrt{8}"), ("18¢", "18 dollars"),
    ("US18", "18"), ("5Ω", "5"), ("ℝ", "R"), ("(x+y+z)^{999}", "18"), ("18", "(x+y+z)^{999}"), ("18x/x", "18"),
    ("(A) or (B)", "A"), ("A, B", "A"), ("(A), (B), (C)", "A"), ("A) 42 B) 43", "A"), (r"42^\circ", r"42\text{ rad}"),
    ("$42", "42 euros"), ("42°C", "42°F"), (r"\$42", "42 cents"), ("{42: 1}", "42"),
    ("42万", "42"), ("18分之一", "18"), ("3倍", "3"), ("42或43", "42"), ("不是42", "42"),
]  # fmt: skip
UNEVALUATED = [  # (given, gold): equal, but the answer still has to be computed
    (r"\sum_{i=1}^{10} i", "55"), ("20 + 35", "55"), ("20+35=", "55"), (r"\binom{5}{2}", "10"), (r"\gcd(12,18)", "6"),
    ("10!", "3628800"), (r"\int_0^1 2x dx", "1"), (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "-2"), ("10/2", "5"),
    (r"\frac{10}{2}", "5"), (r"\sqrt{16}", "4"), (r"5\cdot 8", "40"), ("2^{10}", "1024"), ("x=20+35", "55"),
    ("20+35=35+20", "55"), (r"\sin 30^\circ", "1/2"), (r"e^{i\pi}", "-1"), (r"\log_2 8", "3"), (r"e^{\ln 3}", "3"),
    (r"\int_0^1 \frac{1}{1+x^2} dx", r"\frac{\pi}{4}"), (r"\sin 60^\circ", r"\frac{\sqrt3}{2}"), ("∜(16)", "2"),
    (r"\sum_{k=1}^n k", "n(n+1)/2"), ("(1+1, 2+3)", "(2,5)"), ("1+1,3", "2,3"), (r"x\in\{20+35\}", "55"),
    ("x=20+35, y=2", "55, 2"), (r"20+35\text{ cm}", "55"), (r"\max(3,5)", "5"),
    (r"\lim_{x\to 0} \frac{\sin x}{x}", "1"),
    (r"\begin{pmatrix}1&2\end{pmatrix}\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}5\end{pmatrix}"),
    (r"\prod_{k=1}^{3} k", "6"), ("|3-5|", "2"), (r"\sqrt[3]{27}+1", "4"),
]  # fmt: skip
HOSTILE = [
    "9^{9^{9^9}}", "9^9^9^9", "10000000!", "(10000000)!", "10!!!", "2^{100000}", "(" * 3000 + "1" + ")" * 3000,
    "{" * 100 + "1" + "}" * 100, r"\sum_{i=1}^{100000000}i", "9" * 5000, r"\frac{1}{" * 100 + "1" + "}" * 100,
    r"\boxed{" * 1000, "1" + "+1" * 2000, r"\int_0^1 " * 30 + "x", "(x+y+z)^{999}", "\\" * 300, "\x00", "𝟙𝟚",
]  # fmt: skip


@pytest.mark.parametrize(("given", "gold"), UNEVALUATED)
def test_a_copy_of_the_question_does_not_count_as_an_answer(given: str, gold: str):
    assert score(MathReward(RewardConfig(name="math")), f"So it is \\boxed{{{given}}}.", gold) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("given", "gold"), [("x=20+35=55", "55"), ("20 + 35 = 55", "55"), (r"5! = 120", "120")])
def test_a_computation_with_its_value_counts_as_an_answer(given: str, gold: str):
    assert score(MathReward(RewardConfig(name="math")), f"So it is \\boxed{{{given}}}.", gold) == 1


def test_an_option_accepts_answers_that_are_not_fully_computed():
    generous = MathReward(RewardConfig(name="math", options={"unevaluated": True}))
    pairs = [("20 + 35", "55"), ("10!", "3628800"), (r"\binom{5}{2}", "10"), (r"\sqrt{16}", "4"), (r"\log_2 8", "3")]
    assert [score(generous, f"\\boxed{{{given}}}", gold) for given, gold in pairs] == [1] * 5
    assert score(generous, r"\boxed{20 + 36}", "55") == 0


CHANGES = """
    doubled thirteen fourteen fifteen eighteen nineteen eleventh twelfths twentieth fortieth billionth zillion twentyone
    tripled halved thirds twofold tenfold hundredfold fold lakh lakhs crore dozen pairs couples thrice less more fewer
    point subtracted added increased reciprocal inverted negated imaginary below binary invalid untrue mistaken mistake
    nope unknown undefined impossible unsure sorry or twenty ninth hundredths ones
"""
UNITS = "points clips lights tons letters mistakes people feet remaining used weeks quizzes seconds"


@pytest.fixture(scope="module")
def reward() -> MathReward:
    return MathReward(RewardConfig(name="math"))


def score(reward: MathReward, response: str, answer: object) -> float:
    (result,) = reward.score([RewardItem(0, "d", "p", response, answer)])
    assert result.reward == result.score and not result.error
    return result.score


def table(name: str) -> list[list[str | None]]:
    """The cells of a table in docs/rewards.md: the text in backticks, or None."""
    lines = DOCUMENT.read_text().partition(f"<!-- table: {name} -->\n")[2].partition("\n\n")[0].splitlines()[2:]
    code = re.compile("`([^`]*)`")
    rows = [[(code.search(cell) or [None, None])[1] for cell in line.split(" | ")] for line in lines]
    assert len(rows) > 15, name
    return rows


@pytest.mark.parametrize(("response", "taken"), table("taken"))
def test_the_documented_answers_are_accepted(response: str, taken: str | None):
    assert final_answer(response) == taken


@pytest.mark.parametrize(("given", "gold", "_"), table("equal"))
def test_the_documented_equal_answers_are_equal(reward: MathReward, given: str, gold: str, _: None):
    assert score(reward, f"So it is \\boxed{{{given}}}.", gold) == 1


@pytest.mark.parametrize(("given", "gold", "_"), table("different"))
def test_the_documented_different_answers_are_different(reward: MathReward, given: str, gold: str, _: None):
    assert score(reward, f"So it is \\boxed{{{given}}}.", gold) == 0


@pytest.mark.parametrize(("given", "gold"), RIGHT)
def test_equal_answers_score_1(reward: MathReward, given: str, gold: str):
    assert score(reward, f"So it is \\boxed{{{given}}}.", gold) == 1


@pytest.mark.parametrize(("given", "gold"), WRONG)
def test_different_answers_score_0(reward: MathReward, given: str, gold: str):
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
        ("**#### 18**", "18"),
        ("So it is 18.", "18"),
        ("x is 18.", "18"),
        ("The answer is 3. No, the final answer is: 4 apples", "4 apples"),
        ("Long story.\n\n12\n", "12"),
        ("", None),
        (r"\boxed{5} \boxed{5}", "5"),
        (r"\boxed{1}. Then \boxed{2}, \boxed{3}", "2, 3"),
        (r"<answer>so \boxed{18}</answer> or \boxed{19}", "18"),
        ("<answer>17\n18</answer>", "17\n18"),
        ("The answer is 18. I hope it is correct.", "18"),
        ("The answer is 42 no", "42 no"),
        ("**Answer:** 18", "18"),
        ("Final Answer:\n\n$18$", "18"),
        ("Answer \\[ \n 18 \n \\]", "18"),
        ("Hence:\n$$\n18\n$$", "18"),
        ("Thus, x = 18", "x = 18"),
        ("The total is not 18", "not 18"),
        ("It costs $5 and $18", "It costs $5 and $18"),
        ("The answer is `18`", "18"),
        ("**The answer is 18**", "18"),
        ("**Answer: 18**", "18"),
        ("So: **Final Answer: 18** (see above)", "18 (see above)"),
        ("*The answer is 18*", "18"),
        ("_The answer is 18_", "18"),
        ("__The answer is 18__", "18"),
        ("***The answer is 18.*** I hope so.", "18"),
        ("**The answer is *18***", "18"),
        ("**The answer is `18`**", "18"),
        ("**The answer is 2*3**", "2*3"),
        ("Answer:**18**", "18"),
        ("**Step 3**: the answer is 2**n", "2**n"),
        ("* The answer is 2*x*3", "2*x*3"),
        ("<answer>The answer is 18</answer>", "18"),
        ("#### The answer is not 18", "not 18"),
        ('The answer is "18".', "18"),
        ('The answer is 5"', '5"'),
        ("2**3 * 4", "2**3 * 4"),
        ("From $x = 2$, the price increases by 100%.", "100%"),
        (r"(a) \boxed{1} (b) \boxed{2}", "1, 2"),
        ("答案：5", "5"),
        ("**答案**：5。", "5"),
        ("所以答案是 $5$。", "5"),
        ("最终答案为：18 元。", "18 元"),
        ("因此，小明一共有18个苹果。", "18个苹果"),
        ("所以 $x = 18$。", "x = 18"),
        ("答えは 18 です。", "18 です"),
        ("The solution is " + "x" * 2000, "The solution is " + "x" * 2000),
    ],
)
def test_the_answer_is_found_in_the_response(response: str, answer: str | None):
    assert final_answer(response) == answer


def test_words_after_a_number_change_it_or_are_units(reward: MathReward):
    assert [word for word in CHANGES.split() if score(reward, f"The answer is 42 {word}", "42")] == []
    assert [word for word in UNITS.split() if not score(reward, f"The answer is 42 {word}", "42")] == []


def test_only_a_box_counts_if_boxes_are_required():
    strict = MathReward(RewardConfig(name="math", options={"require_boxed": True}))
    assert score(strict, "#### 4", "4") == 0 and score(strict, r"\boxed{4}", "4") == 1


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        ("5+5=10\n#### 10", "10"), (r"so \boxed{1}. Then \boxed{x^2}", "x^2"), (" 7 ", "7"), ("so 7 ####", ""),
        (r"so \boxed{}", ""), (r"\boxed{7} ####", "7"),
    ],
)  # fmt: skip
def test_gold_answers_are_extracted(answer: str, final: str):
    assert gold_answer(answer) == final


FLAWED = {
    "thinking ####": "is empty", "####\n18": "is empty", r"so \boxed{}": "is empty", r"\boxed{ }": "is empty",
    r"\frac{1": "a { is not closed", r"\sqrt{": "a { is not closed", r"so \boxed{\frac{1}{2}": "a { is not closed",
    r"#### \frac{1}{2}}": "a } closes nothing", r"\frac{1}": r"\frac lacks an argument", r"\dfrac 1": "lacks",
    r"\frac{1}{}": "lacks an argument", r"2\sqrt": r"\sqrt lacks", r"\sqrt[3]": r"\sqrt[3] lacks", r"\sqrt{ }": "lacks",
    r"\begin{pmatrix}1\\2": r"\begin has no \end", r"1\end{pmatrix}": r"\end has no \begin", "x =": "last operator",
    "$x^$": "last operator", "1/": "last operator", r"(x+1)\cdot": "last operator",
}  # fmt: skip
COMPLETE = [
    "C+", "B-", "B)", "(B", "[0,1)", "+", "<=", "=", r"A \to B", r"p \land q", r"\{1,2\}", r"\frac12", r"\frac 1 2",
    r"\frac\pi2", r"\frac{\sqrt{2}}{\{1\}}", r"\sqrt[3]{2}", r"\sqrt 2", r"\\frac{1}{2}", r"\left(1, 2\right]",
    "Müller", r"\text{no solution}", r"\begin{pmatrix}1\\2\end{pmatrix}", "Ca^{2+}", "5!", "{}",
    r"\sqrt{{2}}", "1/2 ", "f'(x)",
]  # fmt: skip


@pytest.mark.parametrize("answer", FLAWED)
def test_an_incomplete_gold_answer_is_a_problem_of_its_row(reward: MathReward, answer: str):
    assert FLAWED[answer] in reward.problem_of_row(answer, {})
    with pytest.raises(ValueError, match=re.escape(FLAWED[answer])):
        score(reward, r"\boxed{4}", answer)


def test_complete_gold_answers_have_no_problem(reward: MathReward):
    golds = [*COMPLETE, *(gold for _, gold in RIGHT), *(gold for _, gold in WRONG), None, " ", 4, 0.5]
    assert [gold for gold in golds if reward.problem_of_row(gold, {})] == []


def test_several_boxes_do_not_form_one_answer(reward: MathReward):
    assert score(reward, r"\boxed{1} \boxed{2} \boxed{3}", "2") == 0


def test_json_numbers_are_answers_and_rows_without_an_answer_are_refused(reward: MathReward):
    assert score(reward, r"\boxed{4.0}", 4) == 1 and score(reward, r"\boxed{1/2}", 0.5) == 1
    with pytest.raises(ValueError, match="no answer to compare with"):
        score(reward, r"\boxed{4}", None)


@pytest.mark.parametrize("gold", ["12" * 20_000 + "a", "1" + "{,}000" * 4000, "7" * 301])
def test_a_too_long_gold_answer_is_an_immediate_error(reward: MathReward, gold: str):
    start = time.process_time()
    with pytest.raises(ValueError, match=rf"has {len(gold)} characters, but at most 300 are compared"):
        score(reward, r"\boxed{18}", f"So #### {gold}")
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("given", HOSTILE)
def test_hostile_answers_are_wrong_within_the_limit(reward: MathReward, given: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(equality, "LIMIT_S", 0.3)
    equality._load_math_verify()
    start = time.process_time()
    for response in (given, f"\\boxed{{{given}}}"):
        (result,) = reward.score([RewardItem(0, "d", "p", response, "1234567")])
        assert result.score == 0 and result.error.startswith("TimeoutError" if result.error else "")
    assert time.process_time() - start < 2


def test_unclosed_boxes_are_parsed_in_linear_time():
    def seconds(count: int) -> float:
        start = time.process_time()
        assert final_answer("\\boxed{" * count) is not None
        return time.process_time() - start

    assert seconds(20_000) < 0.5, "140 kB; the time would be minutes if each looked for its end"


def test_a_run_of_spaces_is_parsed_in_linear_time():
    start = time.process_time()
    assert final_answer("a" + " " * 40_000 + "b") is not None
    assert time.process_time() - start < 0.5, "it would be 10 s if every space began a search"


def burn(cpu_s: float) -> None:
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        pass


@pytest.mark.slow
def test_the_time_limit_counts_cpu_time_and_is_reset_afterwards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(equality, "LIMIT_S", 0.1)
    assert within_limit(lambda: time.sleep(0.3) or "slept") == "slept"
    alarm = signal.getsignal(signal.SIGVTALRM)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    burn(0.2)
    with pytest.raises(TimeoutError, match=r"more than 0.1 s of CPU time"):
        within_limit(lambda: burn(60))
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0) and signal.getsignal(signal.SIGVTALRM) is alarm
    with pytest.raises(KeyError):
        within_limit(lambda: {}["x"])
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.slow
def test_the_time_limit_holds_if_a_library_catches_its_alarm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(equality, "LIMIT_S", 0.1)
    rung = []

    def stubborn(returns: bool) -> str:
        while len(rung) < 2:
            try:
                burn(60)
            except BaseException as error:  # as sympy does in some places
                rung.append(error)
        if not returns:
            burn(60)
        return "what was left when it was cut short"

    for returns in (False, True):
        rung.clear()
        with pytest.raises(TimeoutError):
            within_limit(lambda returns=returns: stubborn(returns))
        assert len(rung) == 2


def test_a_timeout_is_an_error_and_caches_no_gold_answer(monkeypatch: pytest.MonkeyPatch):
    reward = MathReward(RewardConfig(name="math"))
    item = RewardItem(0, "d", "p", r"\boxed{(x+1)^3}", "x^3+3x^2+3x+1")
    monkeypatch.setattr(equality, "LIMIT_S", 1e-3)
    equality._parse_gold.cache_clear()
    (slow,) = reward.score([item])
    assert (slow.reward, slow.score) == (0.0, 0.0)
    assert slow.error == "TimeoutError: comparing the response with the answer takes more than 0.001 s of CPU time"
    monkeypatch.undo()
    assert reward.score([item])[0].score == 1


@pytest.mark.slow
def test_importing_sympy_is_not_timed_and_simple_answers_do_not_need_it():
    code = """if True:
        import sys
        from hpcrl.rewards.grading import equality
        equality.LIMIT_S = 0.3  # the import takes more
        assert equality.equivalent("1/2", "0.5") and not equality.equivalent("18", "19 apples")
        assert "sympy" not in sys.modules
        assert equality.equivalent("1+x", "x+1")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_explosive_expressions_are_distinguished_from_ordinary_mathematics():
    assert all(map(is_explosive, ("9^{9^9}", "2^{12345}", "(9999)!", "3!!", "(" * 30)))
    assert not any(map(is_explosive, ("e^{x^2}", "2^{2024}", "10!", r"\frac{\sqrt{3}}{2}", "x^{10}+y^2")))
    assert equivalent("9^{9^9}", "9^{9^9}"), "equal text is equal even there"
    nested = "(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH
    assert not is_explosive(nested + "+(2)") and is_explosive(f"({nested})") and not is_explosive("()" * 100)


@pytest.mark.parametrize(("gold", "given"), [("42", "42)("), ("3", "3)/(4"), ("2", "2)^(3")])
def test_a_bracket_that_closes_before_it_opens_is_no_answer(gold: str, given: str) -> None:
    """Equally many brackets open and close, and math-verify would read the text before the first."""
    assert not equivalent(gold, given) and not equivalent(given, gold)


def test_gsm8k_gold_answers_score_1(reward: MathReward, shared_data):
    lines = (shared_data / "gsm8k" / "test.jsonl").read_text().splitlines()
    golds = [json.loads(line)["answer"] for line in lines]
    train = (shared_data / "gsm8k" / "train.jsonl").read_text().splitlines()
    of_train = [json.loads(line)["answer"] for line in train]
    assert [gold for gold in golds + of_train if reward.problem_of_row(gold, {})] == []
    assert sum(score(reward, gold, gold) for gold in golds) == len(golds) == 1319
    boxed = [rf"<think>\boxed{{0.5}}</think>\boxed{{{gold_answer(gold)}}}" for gold in golds]
    assert sum(map(score, [reward] * 1319, boxed, golds)) == 1319
    shifted = golds[1:] + golds[:1]
    same = sum(gold_answer(a) == gold_answer(b) for a, b in zip(golds, shifted, strict=True))
    assert sum(map(score, [reward] * 1319, shifted, golds)) == same < 20
