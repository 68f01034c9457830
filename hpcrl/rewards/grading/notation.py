"""Normal form of answers (ASCII LaTeX without layout), and numbers, percentages and units in answers."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

_GREEK = "αβγδεϵζηθϑικλμ\u00b5νξπρσςτυφϕχψωΓΔΘΛΞΠΣΥΦΨΩ\u2126"  # none that looks Latin; with the micro and ohm signs
_GREEK_NAMES = """
    alpha beta gamma delta epsilon epsilon zeta eta theta theta iota kappa lambda mu mu nu xi pi rho sigma sigma tau
    upsilon phi phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega Omega
"""
_SIGNS = str.maketrans(
    {
        **dict.fromkeys("−–—﹣－‐‑‒", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u200a\u202f", " "),
        **dict.fromkeys("’′", "'"),
        **dict.fromkeys("£€¥₹₩₽₺₫₱₪₦₴฿￡￥￦", ""),
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/", "±": r"\pm ", "°": r"^\circ ",
        "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
        "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "％": "%", "¢": " cents",
        **{char: rf"\{name} " for char, name in zip(_GREEK, _GREEK_NAMES.split(), strict=True)},
        **{char: rf"\mathbb{{{name}}}" for char, name in zip("ℂℕℚℝℤ", "CNQRZ", strict=True)},
    }
)  # fmt: skip
_VULGAR = re.compile(r"(\^?)([¼-¾⅐-⅞↉])")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋]+")
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")
_INDICES = {"√": "", "∛": "[3]", "∜": "[4]"}
_ESCAPED_TWICE = re.compile(r"\\\\(?=[A-Za-z])")
_DELIMITER = re.compile(r"(?<!\\)(?:\\\\)*\\[()\[\]]|\bUS\\?\$(?=\s*[\d.])|\\?\$")
_LAYOUT = re.compile(
    r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|limits)(?![A-Za-z])|\^\s*\{?\s*\\circ\s*\}?\s*(?:\\?[CF]\b)?"
)
_SPACING = re.compile(r"(?:(?<!\\)\\(?:[;:> !,]|q?quad\b)|~|\s)+")
_RENAMED_COMMANDS = [
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(le|ge|ne)(?:q|qslant)?(?![A-Za-z]) *"), r"\\\1 "),
    (re.compile(r"\\var(?=(?:epsilon|theta|rho|sigma|phi)(?![A-Za-z]))"), r"\\"),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
]
_RENAMED_NAMES = [
    (re.compile(r"\s+(?=[_^])"), ""),
    (re.compile(r"<= *"), r"\\le "),
    (re.compile(r">= *"), r"\\ge "),
    (re.compile(r"!= *"), r"\\ne "),
    (re.compile(r"(?<![\\A-Za-z])(pi|sqrt|sin|cos|tan|log|ln|exp|infty)(?![A-Za-z]) *"), r"\\\1 "),
    (re.compile(r"(?<![\\A-Za-z])(?:infinity|inf)(?![A-Za-z]) *"), r"\\infty "),
    (re.compile(r"\\sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"([_^])\{(\w)\}"), r"\1\2"),
    (re.compile(r"_\{?10\}?$"), ""),
]
_MAY_BE_RENAMED = re.compile(r"[<>!_^]|(?<![\\A-Za-z])(?:pi|sqrt|sin|cos|tan|log|ln|exp|inf)")
_TEXT = re.compile(
    r"\\(?:(?P<upright>text|textnormal|textrm|mathrm|mbox)|textbf|textit|texttt|mathbf|mathit|operatorname)"
    r"\s*\{(?P<content>[^{}]*)\}"
)
_LATEX_THOUSANDS = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?:(?:\s?\{,\s*\}\s?|,\s*\\!\s*|\\,\s?)\d{3})+(?!\d)")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_SPACED_THOUSANDS = re.compile(r"([+-]?[1-9]\d{0,2}(?: \d{3})+)((?:\.\d+)?(?:[^\d,]|$).*)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{?(\d+)\}?")
_APPROXIMATELY = re.compile(r"(?:\\approx|\\sim|approximately|about|exactly)(?![A-Za-z])\s*", re.IGNORECASE)

_MEASURES = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "degrees": r"\^\s*\{?\s*\\circ|°|\\degree\b|\bdeg(?:rees?)?\b",
        "radians": r"\brad(?:ians?)?\b",
        "celsius": r"(?:\\circ\s*\}?|°)\s*(?:\\\w+\s*\{?)?\s*C\b|\bcelsius\b",
        "fahrenheit": r"(?:\\circ\s*\}?|°)\s*(?:\\\w+\s*\{?)?\s*F\b|\bfahrenheit\b",
        "dollars": r"(?<!\\)\\\$|\bUS\$|^\$(?=\s*[\d.])(?!.*\$)|\b(?:dollars?|usd)\b",
        "cents": r"¢|\bcents?\b",
        "euros": r"€|\beuros?\b",
        "pounds": r"[£￡]|\bgbp\b",
        "yen": r"[¥￥]|\b(?:yen|yuan|jpy|cny)\b",
        "rupees": r"[₹]|\b(?:rupees?|inr)\b",
    }.items()
}
"""Signs and words of measures that normalise() removes, or that match any unit."""

_DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
_LITERAL = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:"
    rf"(?P<whole>\d+)\s*\\frac\s*\{{?(?P<mixed_top>\d+)\}}?\s*\{{?(?P<mixed_bottom>\d+)\}}?"
    rf"|(?P<spaced>\d+)\s+(?P<spaced_top>\d+)\s*/\s*(?P<spaced_bottom>\d+)"
    rf"|\\frac\s*\{{(?P<minus>-?)\s*(?P<top>{_DECIMAL})\}}\s*\{{(?P<bottom>{_DECIMAL})\}}"
    rf"|\\frac\s*(?P<short_top>\d)\s*(?P<short_bottom>\d)"
    rf"|(?P<over>{_DECIMAL})\s*/\s*(?P<under>{_DECIMAL})"
    rf"|(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[+-]?\d{{1,3}})"
    rf"|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{{?(?P<power>[+-]?\d{{1,3}})\}}?)?"
    rf")"
)
_UNIT_WORD = r"[A-Za-z]+(?:\^\{?-?\d\}?)?"
_UNITS = re.compile(rf"{_UNIT_WORD}(?:(?:\s*(?:/|-)\s*|\s+){_UNIT_WORD}){{0,5}}")
UNIT_MARK = "\x1f"
"""In a normal form, marks letters that were in \\text or \\mathrm: they may be a unit, but not a product of variables.
str.strip and regular expressions treat this character as a space."""
_EXPRESSION_WITH_MARK = re.compile(rf"([^{UNIT_MARK}]*[^\s=]) ?{UNIT_MARK}({_UNITS.pattern})")
_EXPRESSION_WITH_UNIT = re.compile(rf"(.*(?:[\d)}}\]]|\\[A-Za-z]+(?![A-Za-z])))(\s*)({_UNITS.pattern})")
_ONE_UNIT = rf"\s*{UNIT_MARK}([A-Za-z]+(?:\s?\^\{{?\d\}}?)?)\s?"
_UNIT_FRACTION = re.compile(rf"\\[dtc]?frac\s?\{{{_ONE_UNIT}\}}\s?\{{{_ONE_UNIT}\}}")
_CONSTANT = re.compile(r"(?:\\(?:pi|sqrt|frac|cdot|times|pm|log|ln|sin|cos|tan)(?![A-Za-z])|[^A-Za-z\\])*")
_RATE = re.compile(r"(?:/\s*|\s(?:an?|per)\s+)(day|min|[A-Za-z]{4,})")
_COUNTED = re.compile(
    r"\s*(?![^\s]*[十百千万萬亿億兆倍分半折或和不约約余餘多几幾负負])[\u3040-\u30ff\u4e00-\u9fff]{1,12}"
)
"""Chinese or Japanese words after a number, except words that change the number."""
_SHORT_UNITS = """
    mm cm dm km mg kg lb lbs oz ft in yd mi qt pt ml cl dl ms hr hrs mph kph kmh rpm fps hz khz mhz ghz kw kwh mw wh kj
    mj ev kv db pa kpa mol sq cu st pm am min mins gms
"""
_LETTER_UNITS = "m s g h l"
_MARKED_LETTERS = "L N V W J K C A"
_NUMBER_WORD = re.compile(
    r"(?:(?:zero|one|two|three|four|five|fif|six|seven|eight?|nine?|ten|eleven|twel(?:ve|f)"
    r"|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)t(?:y|ie)"
    r"|dozen|hundred|thousand|lakh|crore|[a-z]{1,6}illion)(?:e?s|ths?|fold)?)+"
)
_CHANGE_A_NUMBER = """
    one two six ten half halves halve third quarter score gross pair couple duo trio fold once twice thrice double
    triple treble quadruple quintuple sextuple percent percentage percentile permille less more fewer greater smaller
    larger plus minus times add subtract multiply multiplied divide squared cubed over under above below beyond negative
    negate inverse invert reciprocal opposite conjugate imaginary power exponent root logarithm mod modulo modulus
    remainder choose factorial binary octal hexadecimal
"""
_CHANGE_IT_IN_THIS_FORM = frozenset(["point", "mistake", "error", "increased", "decreased", "reduced"])
"""Points, mistakes and errors are units, as is the increase in 25% increase."""
_TAKE_IT_BACK_OR_GO_ON = """
    no not never nope nah neither nor none nothing cannot wrong wrongly incorrect incorrectly false falsely untrue
    invalid inaccurate mistaken mistakenly erroneous unknown undefined undetermined indeterminate uncertain unsure
    impossible unsolvable unclear doubtful sorry oops or and but if then than to through is are was were isn the this
    that because since so from with without except excluding instead rather maybe perhaps possibly probably either
    approximately roughly nearly almost least most unless although though however versus until
"""
_MATHEMATICAL = """
    pi tau phi theta alpha beta gamma delta lambda sigma omega sqrt sin cos tan cot sec csc log ln exp max min gcd lcm
    det abc xyz infinity inf infty
"""
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TAKES_ARGUMENTS = re.compile(r"\\(?:(?P<two>[dtc]?frac)|sqrt(?:\s*\[[^\]]*\])?)(?![A-Za-z])")
_ARGUMENT = re.compile(r"\s*(?:\{\s*[^\s}]|\\[A-Za-z]+|\\?[^\s{}])")
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z*]+\}|\\[A-Za-z]+")
_BINDS = re.compile(r"\\(?:i{1,4}nt|oint|sum|prod|lim|in)(?![A-Za-z])")
_VARIABLE = re.compile(r"[A-Za-df-hj-z]")
_ENVIRONMENT = re.compile(r"\\(begin|end)(?![A-Za-z])")
_NO_RIGHT_SIDE = re.compile(r"[\w)\]}]\s*(?:[=^/]|\\(?:cdot|times|div|pm)(?![A-Za-z]))\s*\$*\s*$")
LENGTHS = frozenset(["mm", "cm", "dm", "km", "ft"])
MARKED_LETTERS = frozenset(_MARKED_LETTERS.split())
SHORT_UNITS, LETTER_UNITS = frozenset(_SHORT_UNITS.split()), frozenset(_LETTER_UNITS.split())
PRODUCTS = frozenset({"abc", "xyz"})
"""Neither units nor words: products of letters."""
NO_UNITS = frozenset((_CHANGE_A_NUMBER + _TAKE_IT_BACK_OR_GO_ON + _MATHEMATICAL).split())


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number as an answer; `value` is as written before any percent sign."""

    value: Fraction | int
    percent: bool = False
    unit: str = ""

    def equals(self, other: Quantity) -> bool:
        """Equal numbers, to 6 digits; a unit may be missing on one side, and 75% equals 75 and .75."""
        if self.unit and other.unit and self.unit != other.unit:
            return False
        if close(self.value, other.value):
            return True
        if self.percent == other.percent:
            return False
        hundredth = Fraction(1, 100)
        a, b = (hundredth, 1) if self.percent else (1, hundredth)
        return close(self.value * a, other.value * b)


def close(a: Fraction | int, b: Fraction | int) -> bool:
    """Whether two numbers differ by at most 1e-6, or, below 1, by at most 1e-6 of the smaller one."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    a, b = Fraction(a), Fraction(b)
    return abs(a - b) <= Fraction(1, 10**6) * min(abs(a), abs(b), Fraction(1))


def normalise(text: str) -> str:
    """The answer without layout, currency signs and thousands separators, in ASCII LaTeX where possible."""
    text = text.strip()
    if text.isdigit() and text.isascii():
        return text
    if not text.isascii():
        text = _ascii(text)
    if "\\\\" in text and "\\begin" not in text:
        text = _ESCAPED_TWICE.sub("\\\\", text)
    if "\\" in text or "$" in text or "{" in text:
        text = _LATEX_THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
        text = _DELIMITER.sub(" ", text)
        text = _TEXT.sub(_marked, _TEXT.sub(_marked, text.replace(UNIT_MARK, " ")))
        text = _LAYOUT.sub(" ", text)
        text = _UNIT_FRACTION.sub(rf"{UNIT_MARK}\1/\2", text)
    text = _SPACING.sub(lambda match: UNIT_MARK if UNIT_MARK in match[0] else " ", text).strip()
    if not text.isdigit():
        if "\\" in text:
            for pattern, replacement in _RENAMED_COMMANDS:
                text = pattern.sub(replacement, text)
            text = _REPEATING.sub(_fraction, text)
        if _MAY_BE_RENAMED.search(text):
            for pattern, replacement in _RENAMED_NAMES:
                text = pattern.sub(replacement, text)
        text = _join_thousands(_APPROXIMATELY.sub("", text, count=1) if _APPROXIMATELY.match(text) else text)
    text = text.strip().removesuffix("。").strip()
    return text if text.endswith("..") else text.removesuffix(".").strip()


def flaw_of(text: str) -> str:
    """The missing part in the LaTeX of an answer that was cut off or never completed; empty if there is none. Words,
    and commands that math-verify does not support, are no flaw: they are compared as text."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}":
            if not opened:
                return "a } closes nothing"
            closing[opened.pop()] = brace.end()
    if opened:
        return "a { is not closed"
    for command in _TAKES_ARGUMENTS.finditer(text):
        end = command.end()
        for _ in range(2 if command["two"] else 1):
            argument = _ARGUMENT.match(text, end)
            if argument is None:
                return f"{command[0]} lacks an argument"
            brace_at = text.find("{", end, argument.end())
            end = closing[brace_at] if brace_at in closing else argument.end()
    ends = [match[1] for match in _ENVIRONMENT.finditer(text)]
    if ends.count("begin") != ends.count("end"):
        return r"a \begin has no \end" if ends.count("begin") > ends.count("end") else r"an \end has no \begin"
    return "nothing follows its last operator" if _NO_RIGHT_SIDE.search(text) else ""


def plain(text: str) -> str:
    """Normal form for comparison as text: without redundant spaces and percent signs."""
    if text.isalnum():
        return text
    text = re.sub(r"(?<=[\d}])\s*\\?%", "", text.replace(UNIT_MARK, " "))
    return re.sub(r"\s+(?![A-Za-z0-9])|(?<![A-Za-z0-9])\s+", "", text)


def quantity(text: str, letter_after_number: bool = False) -> Quantity | None:
    """The number and unit of an answer in normal form; None if the answer is not a number. 5 m is a number with a unit;
    5m only with `letter_after_number`, since m may be a variable."""
    if text.isascii() and text.isdigit():
        return Quantity(int(text))
    match = _LITERAL.match(text)
    if match is None:
        return None
    rest = text[match.end() :]
    percent = re.match(r"\s*(?:\\?%|percent(?:age)?\b|per cent\b)", rest, re.IGNORECASE)
    rest = rest[percent.end() :] if percent else rest
    if _COUNTED.fullmatch(rest):
        rest = ""
    if rest and (rest[0].isdigit() or rest[0] in ".,_^"):
        return None
    value = _value(match)
    unit = _unit(rest, letter_after_number)
    return None if value is None or unit is None else Quantity(value, percent is not None, unit)


def is_division(text: str) -> bool:
    """Whether an answer in normal form begins with a division to evaluate: of decimals, or with an integer value."""
    match = _LITERAL.match(text)
    top = match and (match["top"] or match["short_top"] or match["over"])
    if not match or not top:
        return False
    bottom = match["bottom"] or match["short_bottom"] or match["under"]
    return not (top + bottom).isdigit() or (int(bottom) != 0 and int(top) % int(bottom) == 0)


def measures_differ(text: str, other: str) -> bool:
    """Whether two answers as written are in different currencies, angles or temperatures: degrees against radians."""
    own, others = _measures(text), _measures(other)
    return bool(own - others) and bool(others - own)


@lru_cache(maxsize=4096)
def _measures(text: str) -> frozenset[str]:
    if text.isascii() and text.isdigit():
        return frozenset()
    return frozenset(name for name, pattern in _MEASURES.items() if pattern.search(text))


def unit_apart(text: str) -> tuple[str, str]:
    """An expression in normal form and the unit after it ("" without one).

    Letters from \\text or \\mathrm are a unit after any expression, other letters only after an expression without
    variables: x^2 h is a product. After a name, only lengths and words are units: 2\\pi hr is a product.
    """
    if match := _EXPRESSION_WITH_MARK.fullmatch(text):
        expression, letters = match.groups()
        known = SHORT_UNITS | LETTER_UNITS | MARKED_LETTERS
        if _CONSTANT.fullmatch(expression) or known.issuperset(re.findall(r"[A-Za-z]+", letters)):
            return (expression, unit) if (unit := _unit(UNIT_MARK + letters)) else (text, "")
        return text, ""
    match = _EXPRESSION_WITH_UNIT.fullmatch(text)
    if match is None or not _CONSTANT.fullmatch(match[1]):
        return text, ""
    expression, space, letters = match.groups()
    first = re.match("[A-Za-z]+", letters)[0].lower()  # type: ignore[index]
    after_name = re.search(r"\\[A-Za-z]+$", expression)
    known = LENGTHS | {"m"} if after_name else SHORT_UNITS | LETTER_UNITS
    unit = _unit(space + letters) if first in known or len(first) > 3 else None
    return (expression, unit) if unit else (text, "")


def is_surely_unit(text: str) -> bool:
    """Whether an answer in normal form ends in a unit that cannot be a product: \\text{ m}, or a length as in 2 cm."""
    expression, unit = unit_apart(text)
    rest = text[len(expression) :]
    return bool(unit) and (UNIT_MARK in rest or (rest[0].isspace() and re.split(r"[ /^-]", unit)[0] in LENGTHS))


def has_other_words(text: str) -> bool:
    """Whether `text` has words that are not mathematical, and is therefore compared as text."""
    for run in _letters(text):
        if len(run) >= 4 or run.lower() in NO_UNITS - PRODUCTS:
            return True
    bare = text.strip()
    return bare.isalpha() and len(bare) > 1 and not re.fullmatch("[u-z]+", bare)


def names(text: str) -> list[str]:
    """The runs of capital letters in an answer: points and sets, whose letters have an order."""
    return sorted(run for run in _letters(text) if len(run) > 1 and run.isupper())


def has_variable(text: str) -> bool:
    """Whether an expression has a free variable: a letter that is neither a constant nor bound by a sum, product,
    integral, limit or a membership such as x \\in A."""
    return not _BINDS.search(text) and bool(_VARIABLE.search(_COMMAND.sub(" ", text)))


def _letters(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]{2,}", _COMMAND.sub(" ", text))


def _marked(match: re.Match[str]) -> str:
    is_mark = match["upright"] and re.match(r"\s*[A-Za-z]", match["content"])
    return f"{UNIT_MARK if is_mark else ' '}{match['content']} "


def _ascii(text: str) -> str:
    text = _VULGAR.sub(_vulgar, text)
    text = _RAISED.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m[0]).replace('−', '-')}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{unicodedata.normalize('NFKC', m[0]).replace('−', '-')}}}", text)
    text = _ROOT.sub(lambda m: f"\\sqrt{_INDICES[m[1]]}{{{m[2] or m[3] or m[4]}}}", text)
    return unicodedata.normalize("NFKC", text.translate(_SIGNS)) if not text.isascii() else text


def _vulgar(match: re.Match[str]) -> str:
    raised, char = match.groups()
    fraction = "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", char).split("⁄"))
    return f"^{{{fraction}}}" if raised else fraction


def _join_thousands(text: str) -> str:
    """Remove thousands separators where a comma or space cannot be anything else: in a whole answer, and outside
    brackets without other commas, since `(12,102)` is a pair."""
    if match := _SPACED_THOUSANDS.fullmatch(text):
        return match[1].replace(" ", "") + match[2]
    if "," not in text or re.search(r"[(\[{].*,.*[)\]}]", text):
        return text
    joined = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return text if "," in joined else joined


def _fraction(match: re.Match[str]) -> str:
    whole, fixed, repeated = match.groups()
    tail = Fraction(int(repeated), 10 ** len(fixed) * (10 ** len(repeated) - 1))
    value = Fraction(int(whole + fixed or "0"), 10 ** len(fixed)) + tail
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _value(match: re.Match[str]) -> Fraction | int | None:
    part = match.groupdict()
    sign = -1 if part["sign"] == "-" else 1
    if part["decimal"] and part["decimal"].isdigit() and not (part["exponent"] or part["power"]):
        return sign * int(part["decimal"])
    whole = part["whole"] or part["spaced"]
    if whole:
        top, bottom = part["mixed_top"] or part["spaced_top"], part["mixed_bottom"] or part["spaced_bottom"]
        return sign * (int(whole) + Fraction(int(top), int(bottom))) if int(bottom) else None
    top = part["top"] or part["short_top"] or part["over"]
    if top:
        bottom = Fraction(part["bottom"] or part["short_bottom"] or part["under"])
        return sign * (-1 if part["minus"] else 1) * Fraction(top) / bottom if bottom else None
    return sign * Fraction(part["decimal"]) * Fraction(10) ** int(part["exponent"] or part["power"] or 0)


@lru_cache(maxsize=4096)
def _unit(text: str, letter_after_number: bool = False) -> str | None:
    """The unit after a number, in comparable form ("" without one); None if the words may change the number."""
    if not text:
        return ""
    if rate := _RATE.fullmatch(text):
        return None if _changes(rate[1].lower()) and rate[1] != "min" else f"per {_singular(rate[1].lower())}"
    marked, attached, text = text.lstrip(" ").startswith(UNIT_MARK), not text[0].isspace(), text.strip()
    if len(text) > 100 or not _UNITS.fullmatch(text):
        return None
    words = re.findall(_UNIT_WORD, text)
    before = ["", *(gap.strip() for gap in re.split(_UNIT_WORD, text)[1:-1])]
    for place, word in enumerate(words):
        letters = re.match("[A-Za-z]+", word)[0]  # type: ignore[index]
        if letters in LETTER_UNITS:
            is_factor = place > 0 and not before[place] and set(words[place - 1]) <= LETTER_UNITS  # m g h
            may_be_unit = letter_after_number and letters in (word, "m")  # 4s^2 is none, 4m^2 may be one
            known = marked or not (is_factor or (attached and place == 0 and not may_be_unit))
        else:
            known = letters.lower() in SHORT_UNITS or (marked and place == 0 and letters in MARKED_LETTERS)
        is_product = LETTER_UNITS.issuperset(letters)  # mgh
        if not known and (len(letters) < 3 or (attached and place == 0) or is_product or _changes(letters.lower())):
            return None
    return "".join(
        f"{gap if gap or not place else ' '}{_singular(word.lower())}"
        for place, (gap, word) in enumerate(zip(before, words, strict=True))
    )


def _singular(unit: str) -> str:
    return unit.removesuffix("s") if len(unit) > 2 else unit


def _changes(word: str) -> bool:
    """Whether a word after a number changes the number, or shows that the number is not the answer."""
    if word in _CHANGE_IT_IN_THIS_FORM or _NUMBER_WORD.fullmatch(word):
        return True
    return any(word.removesuffix(ending) in NO_UNITS for ending in ("", "s", "es", "d", "ed", "fold"))
