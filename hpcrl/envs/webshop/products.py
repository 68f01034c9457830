"""Products and goals, from items, attributes and instructions in the form of the original's files.

The files, from https://github.com/princeton-nlp/WebShop, are a list of items, an object of asin -> attributes with a
synthetic instruction, and an object of asin -> instructions by people.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NO_LIMIT = 1e6
"""Stands for no price limit, for products that are too expensive for one."""
DEFAULT_PRICE = 100.0


@dataclass(frozen=True, slots=True)
class Product:
    """A product of the shop.

    Args:
        path: The category, as a path with its parents.
        options: The values from which a customer chooses, by option name, in lower case.
        prices: The price that is shown, or both ends of the range that is shown.
        price: The actual price, which must not exceed a goal's limit.
    """

    asin: str
    name: str
    query: str
    path: str
    description: str
    features: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    prices: tuple[float, ...]
    price: float

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price}" for price in self.prices)


@dataclass(frozen=True, slots=True)
class Goal:
    """What to buy.

    Args:
        product: The product from which the goal was made.
        options: The wanted values, without or with the option name.
        price_upper: The price limit.
        weight: How often the goal is drawn, relative to other goals.
    """

    product: Product
    text: str
    attributes: tuple[str, ...]
    options: tuple[str | tuple[str, str], ...]
    price_upper: float
    weight: float = 1.0


def products_of(items: Iterable[Mapping[str, Any]], attributes: Mapping[str, Mapping[str, Any]]) -> list[Product]:
    """Products without duplicates and without asins "nan" or above 10 characters. ValueError names an invalid item."""
    found: dict[str, Product] = {}
    for number, item in enumerate(items):
        try:
            asin = item["asin"]
            if asin != "nan" and len(asin) <= 10 and asin not in found:
                found[asin] = _product(item, attributes.get(asin, {}))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"item {number}: {type(error).__name__}: {error}") from error
    return list(found.values())


def _product(item: Mapping[str, Any], about: Mapping[str, Any]) -> Product:
    features = item["small_description"] or []
    options = {
        name.lower(): tuple(value["value"].strip().replace("/", " | ").lower() for value in values)
        for name, values in (item.get("customization_options") or {}).items()
        if values is not None
    }
    numbers = [re.sub(r"[^\d.]", "", part) for part in (item.get("pricing") or "").split("$")[1:]]
    prices = tuple(float(number) for number in numbers if number)[:2] or (DEFAULT_PRICE,)
    # The original draws a price from the range at every start; here the asin determines it.
    price = prices[0] if len(prices) == 1 else random.Random(item["asin"]).uniform(*prices)
    return Product(
        item["asin"],
        item["name"],
        item["query"].lower().strip(),
        item["product_category"],
        item["full_description"] or "",
        tuple(features) if isinstance(features, list) else (features,),
        tuple(about.get("attributes") or ()),
        options,
        prices,
        price,
    )


def synthetic_goals(products: Iterable[Product], attributes: Mapping[str, Mapping[str, Any]]) -> list[Goal]:
    """A goal for every combination of options of each product with an instruction. Frequent attributes weigh less."""
    made: list[tuple[Product, str, tuple[str, ...], tuple[tuple[str, str], ...], float]] = []
    for product in products:
        about = attributes.get(product.asin, {})
        wanted = tuple(about.get("instruction_attributes") or ())
        if not about.get("instruction") or not wanted:
            continue
        upper = _limit(product, 0)
        for values in itertools.product(*(product.options[name] for name in sorted(product.options))):
            options = tuple(zip(sorted(product.options), values, strict=True))
            said = ", and ".join(f"{name}: {value}" for name, value in options)
            text = about["instruction"] + (f" with {said}" if said else "") + _price_text(upper)
            made.append((product, text, wanted, options, upper))
    count = Counter(attribute for _, _, wanted, _, _ in made for attribute in wanted)
    return [
        Goal(product, text, wanted, options, upper, sum(1 / count[name] for name in wanted) / len(wanted))
        for product, text, wanted, options, upper in made
    ]


def human_goals(products: Iterable[Product], instructions: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Goal]:
    """The human-written instructions that require an attribute. ValueError names an invalid instruction."""
    goals = []
    for product in products:
        for number, said in enumerate(instructions.get(product.asin, ())):
            try:
                upper = _limit(product, number)
                text = said["instruction"].strip(".") + _price_text(upper)
                wanted, options = tuple(said["instruction_attributes"]), tuple(said["instruction_options"])
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"instruction {number} of {product.asin}: {type(error).__name__}: {error}") from error
            if wanted:
                goals.append(Goal(product, text, wanted, options, upper))
    return goals


def _limit(product: Product, number: int) -> float:
    """The larger of two of the next four multiples of 10 dollars above the price; product and `number` are the seed."""
    above = [10.0 * tens for tens in range(1, 100) if 10.0 * tens > product.price][:4]
    return max(random.Random(f"{product.asin}/{number}").sample(above, 2)) if len(above) >= 2 else NO_LIMIT


def _price_text(upper: float) -> str:
    return f", and price lower than {upper:.2f} dollars" if upper < NO_LIMIT else ""
