"""A generated catalogue in the form of the original's files, of any size."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
BRANDS = [
    "Alder",
    "Birch",
    "Cedar",
    "Dover",
    "Elm",
    "Fjord",
    "Gable",
    "Harbor",
    "Inlet",
    "Juniper",
    "Kestrel",
    "Larch",
    "Maple",
    "Nordic",
    "Onyx",
    "Pine",
]
COLOURS = ["black", "blue", "brown", "gray", "green", "navy", "pink", "purple", "red", "white", "yellow"]
SIZES = ["x-small", "small", "medium", "large", "x-large", "xx-large"]
CLOTHES = ("machine wash", "long sleeve", "elastic waist", "quick drying", "loose fit", "cotton lining", "wrinkle free")
SHOES = ("non slip", "arch support", "rubber sole", "memory foam", "water resistant", "leather upper", "slip on")
POWER = ("fast charging", "high speed", "heavy duty", "plug and play", "easy to carry", "gold plated", "overheat safe")
FOOD = ("gluten free", "sugar free", "non gmo", "low calorie", "dairy free", "high protein", "nut free")
CARE = (
    "cruelty free",
    "paraben free",
    "long lasting",
    "fragrance free",
    "natural oils",
    "sensitive skin",
    "travel size",
)
HOME = (
    "easy to clean",
    "space saving",
    "solid wood",
    "easy assembly",
    "stainless steel",
    "eco friendly",
    "scratch proof",
)


class Ware(NamedTuple):
    """A kind of product: its search term, its category, and the attributes and options in which its products differ."""

    query: str
    path: str
    attributes: tuple[str, ...]
    options: dict[str, list[str]]
    price: int


KINDS = (
    Ware("shirt", "Clothing › Tops › Shirts", CLOTHES, {"color": COLOURS, "size": SIZES}, 25),
    Ware("jacket", "Clothing › Outerwear › Jackets", CLOTHES, {"color": COLOURS, "size": SIZES}, 70),
    Ware("trousers", "Clothing › Bottoms › Trousers", CLOTHES, {"color": COLOURS, "size": SIZES}, 40),
    Ware("running shoes", "Clothing › Shoes › Running", SHOES, {"color": COLOURS, "size": [*"6789", "10", "11"]}, 60),
    Ware("sandals", "Clothing › Shoes › Sandals", SHOES, {"color": COLOURS, "size": [*"6789", "10", "11"]}, 30),
    Ware("charger cable", "Electronics › Accessories › Cables", POWER, {"length": ["3ft", "6ft", "10ft"]}, 12),
    Ware("power bank", "Electronics › Accessories › Power Banks", POWER, {"color": COLOURS}, 35),
    Ware("headphones", "Electronics › Audio › Headphones", POWER, {"color": COLOURS}, 80),
    Ware("granola bars", "Grocery › Snacks › Bars", FOOD, {"flavor": ["almond", "cherry", "cocoa", "honey"]}, 15),
    Ware("herbal tea", "Grocery › Beverages › Tea", FOOD, {"flavor": ["ginger", "mango", "sage", "vanilla"]}, 10),
    Ware("shampoo", "Beauty › Hair Care › Shampoos", CARE, {"scent": ["aloe", "cedar", "citrus", "lavender"]}, 14),
    Ware("face cream", "Beauty › Skin Care › Creams", CARE, {"volume": ["30 ml", "50 ml", "100 ml"]}, 22),
    Ware("coffee table", "Home › Furniture › Tables", HOME, {"color": COLOURS, "size": ["small", "large"]}, 150),
    Ware("bookshelf", "Home › Furniture › Shelves", HOME, {"color": COLOURS}, 110),
    Ware("frying pan", "Home › Kitchen › Pans", HOME, {"size": ["8 inch", "10 inch", "12 inch"]}, 45),
    Ware("table lamp", "Home › Lighting › Lamps", HOME, {"color": COLOURS}, 38),
)


def generated(num_products: int, seed: int) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The items, and asin -> attributes with an instruction, of this many products. A product depends only on its
    number and the seed, so a smaller catalogue is the beginning of a larger one."""
    items, attributes = [], {}
    for number in range(num_products):
        rng = random.Random(f"{seed}/{number}")
        kind, brand = rng.choice(KINDS), rng.choice(BRANDS)
        own = rng.sample(kind.attributes, 4)
        options = {
            name: rng.sample(values, rng.randint(2, min(3, len(values)))) for name, values in kind.options.items()
        }
        low = round(kind.price * rng.uniform(0.5, 2.0), 2)
        asin = "B0" + "".join(DIGITS[number >> 5 * place & 31] for place in reversed(range(8)))
        wanted = rng.sample(own, 2)
        attributes[asin] = {
            "attributes": own,
            "instruction": f"i need {kind.query} with these features: {', '.join(wanted)}",
            "instruction_attributes": wanted,
        }
        items.append(
            {
                "asin": asin,
                "name": f"{brand} {kind.query.title()}, {own[0]}, {own[1]}",
                "query": kind.query,
                "category": kind.path.split(" › ")[0].lower(),
                "product_category": kind.path,
                "full_description": f"{kind.query.capitalize()} by {brand}, {own[2]}.",
                "small_description": [f"{name.capitalize()}." for name in own],
                "pricing": f"${low}" if rng.random() < 0.8 else f"${low} - ${round(1.2 * low, 2)}",
                "customization_options": {name: [{"value": one} for one in values] for name, values in options.items()},
            }
        )
    return items, attributes
