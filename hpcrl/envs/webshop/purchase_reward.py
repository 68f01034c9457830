"""WebShop's reward (arXiv 2207.01206, and its code): how well a bought product matches the goal.

    reward = r_type * (matched attributes + matched options + (price <= limit)) / (attributes + options + 1)

r_type compares the kinds of the two products: the queries with which they were collected, their categories, and the
nouns of their names. The original takes nouns from spaCy's tagger; here all alphabetic words except function words
count, including adjectives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hpcrl.envs.webshop.products import Goal, Product
from hpcrl.envs.webshop.search import STOP_WORDS

SIMILAR = 85
"""Attributes and options match if their similarity is above this."""
COLOUR_WORDS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel
camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry
cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey
heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight
mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow
red rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal
tiger turquoise violet walnut wheat white wine yellow
"""
COLOURS = COLOUR_WORDS.split()
"""The original's base colours. An option is compared as the first of them that it contains."""


def reward_of(bought: Product, goal: Goal, chosen: Mapping[str, str]) -> float:
    """The reward, from 0 to 1, of this product with the chosen options (name -> value)."""
    wanted = len(goal.attributes) + len(goal.options) + 1
    matched = num_attributes(bought, goal.attributes) + num_options(chosen.values(), goal.options)
    return kind(bought, goal.product) * (matched + (bought.price <= goal.price_upper)) / wanted


def kind(bought: Product, wanted: Product) -> float:
    """r_type: 1, .5, .1 or 0."""
    nouns = _nouns(wanted.name)
    same = len(_nouns(bought.name) & nouns) / len(nouns) if nouns else 0.2
    if same == 0:
        return 0.0
    if same < 0.1:
        return 0.1
    related = len(_categories(bought) & _categories(wanted)) >= 2
    return 1.0 if bought.query == wanted.query or related or same > 0.2 else 0.5


def num_attributes(bought: Product, wanted: Iterable[str]) -> int:
    """Number of wanted attributes that the product has, among its attributes or in its texts."""
    texts = [bought.name.lower(), " ".join(bought.features).lower(), bought.description.lower()]
    return sum(
        any(similarity(own, attribute) > SIMILAR for own in bought.attributes)
        or any(attribute in text for text in texts)
        for attribute in wanted
    )


def num_options(chosen: Iterable[str], wanted: Iterable[str | tuple[str, str]]) -> int:
    """Number of wanted options among the chosen values. Colours are compared as their base colours."""
    values = [_base(value) for value in chosen]
    return sum(any(similarity(value, _base(option)) > SIMILAR for value in values) for option in wanted)


def similarity(one: str, other: str) -> int:
    """0 to 100, as fuzz.token_set_ratio of the package thefuzz: 100 if one text has all words of the other, else the
    best of three comparisons of common and remaining words."""
    ours, theirs = (set(re.sub(r"\W", " ", text.lower()).split()) for text in (one, other))
    if not ours or not theirs:
        return 0
    common = ours & theirs
    if common and (ours <= theirs or theirs <= ours):
        return 100
    both, left, right = (" ".join(sorted(words)) for words in (common, ours - theirs, theirs - ours))
    first, second = f"{both} {left}".strip(), f"{both} {right}".strip()
    ratios = [_ratio(first, second)] + ([_ratio(both, first), _ratio(both, second)] if both else [])
    return round(100 * max(ratios))


def _ratio(one: str, other: str) -> float:
    """Twice the length of the longest common subsequence, divided by the sum of both lengths."""
    row = [0] * (len(other) + 1)
    for letter in one:
        before = 0
        for place, their in enumerate(other, 1):
            before, row[place] = row[place], before + 1 if letter == their else max(row[place], row[place - 1])
    return 2 * row[-1] / (len(one) + len(other))


def _base(option: str | tuple[str, str]) -> str:
    """The base colour in an option's value, for a pair only if the whole value is a colour; else its text, for a pair
    with the option's name."""
    text = option if isinstance(option, str) else " ".join(option)
    return next((colour for colour in COLOURS if colour in option), text)


def _nouns(name: str) -> set[str]:
    return {word for word in re.findall(r"[^\W\d_]+", name.lower()) if word not in STOP_WORDS}


def _categories(product: Product) -> set[str]:
    return {part.strip() for part in product.path.split("›")}
