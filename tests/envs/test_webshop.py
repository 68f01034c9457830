"""WebShop: its reward by hand, its pages, the original files, and their errors."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import EnvConfig, parse
from hpcrl.data.env_sources import HALF
from hpcrl.envs.factory import check_env, make_env, validate_envs
from hpcrl.envs.spec import WebShopOptions
from hpcrl.envs.webshop.catalogue import catalogue_of
from hpcrl.envs.webshop.generated import generated
from hpcrl.envs.webshop.products import Goal, Product, human_goals, products_of, synthetic_goals
from hpcrl.envs.webshop.purchase_reward import kind, num_attributes, num_options, reward_of, similarity
from hpcrl.envs.webshop.search import Search
from hpcrl.envs.webshop.shop import WebShop

SMALL = {"num_products": 60, "held_out": 10}
PLAIN = {"prompt": "{observation}", "turn": "{observation}", "invalid": "{observation}", "tag": ""}


def item(asin: str = "B000000001", name: str = "Oak Running Shoes", **changes: Any) -> dict[str, Any]:
    return {
        "asin": asin,
        "name": name,
        "query": " Running Shoes ",
        "category": "fashion",
        "product_category": "Clothing › Shoes › Athletic",
        "full_description": "For long ways, with a rubber sole.",
        "small_description": ["Light.", "For women and men."],
        "pricing": "$21.50",
        "customization_options": {"Color": [{"value": "Dark Blue "}, {"value": "red/white"}], "Size": [{"value": "9"}]},
    } | changes


ABOUT = {
    "attributes": ["non slip", "arch support"],
    "instruction": "find shoes",
    "instruction_attributes": ["non slip"],
}


def product(**changes: Any) -> Product:
    (made,) = products_of([item(**changes)], {"B000000001": ABOUT})
    return made


def goal(attributes: tuple[str, ...] = ("non slip", "arch support"), **changes: Any) -> Goal:
    fields: dict[str, Any] = {"options": ("blue", "9"), "price_upper": 30.0} | changes
    return Goal(product(), "shoes", attributes, **fields)


def shop(**options: Any) -> WebShop:
    made: Any = make_env(EnvConfig(name="webshop", options=SMALL | PLAIN | options), {"extra": {}})
    return made


def test_the_reward_by_hand() -> None:
    """(attributes + options + price) / (number of attributes + number of options + 1), times the kind."""
    whole = {"color": "dark blue", "size": "9"}
    assert reward_of(product(), goal(), whole) == 1.0
    assert reward_of(product(), goal(), {"size": "9"}) == (2 + 1 + 1) / 5
    assert reward_of(product(), goal(price_upper=20.0), whole) == (2 + 2 + 0) / 5
    assert reward_of(product(), goal(("non slip", "vegan")), {}) == (1 + 0 + 1) / 5
    assert reward_of(product(), goal(options=()), {}) == (2 + 1) / 3
    other = product(name="Bench", query="bench", product_category="Home › Benches")
    assert reward_of(other, goal(), whole) == 0.0, "another kind is worth nothing"


@pytest.mark.parametrize(
    ("name", "query", "path", "expected"),
    [
        ("Oak Running Shoes", "running shoes", "Clothing › Shoes", 1.0),
        ("Elm Running Shoes", "other", "Home › Lamps", 1.0),  # two of three nouns
        ("Oak Table", "table", "Home › Tables", 1.0),  # one of three is more than .2
        ("Lamp", "running shoes", "Clothing › Shoes", 0.0),  # no noun at all outweighs query and category
    ],
)
def test_match_of_product_kinds_by_hand(name: str, query: str, path: str, expected: float) -> None:
    assert kind(product(name=name, query=query, product_category=path), product()) == expected


@pytest.mark.parametrize(
    ("num_words", "query", "path", "expected"),
    [
        (5, "other", "Home", 0.5),  # one of five is not more than .2
        (5, "wanted", "Home", 1.0),
        (5, "other", "Shoes › Clothing › Home", 1.0),  # two categories in common, in any order
        (5, "other", "Shoes › Shoes › Home", 0.5),
        (11, "wanted", "Clothing › Shoes", 0.1),  # one of eleven is less than .1
    ],
)
def test_kinds_with_few_common_words_match_partially(num_words: int, query: str, path: str, expected: float) -> None:
    wanted = product(name=" ".join("word" + letter for letter in "abcdefghijk"[:num_words]), query="wanted")
    assert kind(product(name="worda of 2 lamps", query=query, product_category=path), wanted) == expected


def test_attributes_and_options_are_matched_by_words() -> None:
    bought = product(full_description="made with Natural Ingredients")
    wanted = ("Arch Support", "natural ingredients", "for women", "arch", "sport", "non-slip sole")
    assert [num_attributes(bought, [name]) for name in wanted] == [1, 1, 1, 1, 0, 1]
    assert num_options(["dark red", "xl"], ["dark green", "XL"]) == 2, "dark comes before both colours"
    assert num_options(["red"], [("color", "red")]) == 1
    assert num_options(["light red"], [("color", "red")]) == 0, "the pair is red, the value is light"
    assert num_options([], ["red"]) == num_options(["red"], []) == 0


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("tea tree", "tree tea oil", 100),
        ("essential oil", "essential oils", 96),  # 2 * 13 / 27
        ("abc", "abd", 67),  # 2 * 2 / 6
        ("x-large", "large", 100),
        ("a b", "a c", 67),
        ("", "a", 0),
        ("!", "a", 0),
    ],
)
def test_similarity_by_hand(one: str, other: str, expected: int) -> None:
    """The same as fuzz.token_set_ratio of rapidfuzz, which 20,000 random pairs confirmed."""
    assert similarity(one, other) == similarity(other, one) == expected


def test_products_and_goals_are_read_from_the_original_files() -> None:
    items = [
        item(),
        item(name="twice"),
        item("nan"),
        item("B00000000002"),
        item("B000000002", pricing=None, customization_options=None, small_description="One."),
        item("B000000003", pricing="$1,010.00 - $1,020.50"),
    ]
    first, second, third = products_of(items, {"B000000001": ABOUT})
    assert first.options == {"color": ("dark blue", "red | white"), "size": ("9",)} and first.query == "running shoes"
    assert (first.price, first.price_tag, second.prices, second.features) == (21.5, "$21.5", (100.0,), ("One.",))
    assert 1010 <= third.price <= 1020.5 and third.price_tag == "$1010.0 to $1020.5"
    goals = synthetic_goals([first, second, third], {"B000000001": ABOUT, "B000000003": {"attributes": []}})
    assert [one.options for one in goals] == [(("color", value), ("size", "9")) for value in first.options["color"]]
    assert goals[0].price_upper in (40.0, 50.0, 60.0) and [one.weight for one in goals] == [0.5, 0.5]
    assert goals[0].text == (
        f"find shoes with color: dark blue, and size: 9, and price lower than {goals[0].price_upper:.2f} dollars"
    )
    said = {"instruction": "i want shoes.", "instruction_attributes": ["light"], "instruction_options": ["red"]}
    human = human_goals(
        [first, third], {"B000000001": [said, said | {"instruction_attributes": []}], third.asin: [said]}
    )
    assert [one.options for one in human] == [("red",), ("red",)]
    assert human[1].text == "i want shoes" and human[1].price_upper == 1e6, "no limit is above its price"


def test_search_ranks_the_best_first_and_ignores_operators() -> None:
    names = ["red shoes", "blue shoes", "red hat", "running in red shoes of shoes"]
    search = Search([product(name=name, full_description="", small_description=[]) for name in names])
    assert search.find("RED shoe", 10)[0] in (0, 3) and set(search.find("red shoe", 10)) == {0, 1, 2, 3}
    assert search.find("hat", 10) == [2] and search.find("shoes", 1) == [3]
    for hostile in (
        "",
        "the",
        '"',
        'x" OR "hat',
        "hat NOT hat",
        "text:hat *",
        "NEAR(hat)",
        "\0\ud800",
        "'; drop table",
    ):
        assert set(search.find(hostile, 10)) <= {2}
    assert search.find(" ".join(f"w{number}" for number in range(100_000)) + " hat", 5) == []


def test_an_episode_through_all_kinds_of_pages() -> None:
    env = shop(show_attributes=True)
    assert env.reset(3)[0] == "Search" and env.actions == ["search[...]"]
    text, reward, *ended, info = env.step("Search[shoes sandals shirt jacket]")
    assert text.startswith("Page 1 (Total results: ") and (reward, ended) == (0.0, [False, False])
    first = env.actions[2:]
    assert env.actions[:2] == ["click[back to search]", "click[next >]"] and len(first) == 10
    assert env.step("click[next >]")[0].startswith("Page 2") and env.actions[1] == "click[< prev]"
    env.step("click[< prev]")
    assert env.actions[2:] == first
    text, *_ = env.step(first[0].upper().replace("CLICK", "click"))
    bought = env.product
    assert bought is not None and text.startswith(f"{bought.name}\nPrice: {bought.price_tag}")
    for page, shown in {"description": bought.description, "features": bought.features[1]}.items():
        assert shown in env.step(f"click[{page}]")[0] and env.actions == ["click[back to search]", "click[< prev]"]
        env.step("click[< prev]")
    assert env.step("click[attributes]")[0].endswith("\n".join(bought.attributes))
    env.step("click[< prev]")
    (name, values), *_ = bought.options.items()
    for value in values[:2]:
        text, *_, info = env.step(f"click[{value}]")
        assert text.endswith(f"You have chosen {name}: {value}") and env.chosen == {name: value}
    assert info["metrics"] == {"success": 0.0, "action_is_valid": 1.0, "action_is_effective": 1.0}
    before = env.chosen
    _, reward, ended_now, _, info = env.step("click[buy now]")
    assert ended_now and reward == reward_of(bought, env.goal, before)
    assert info["metrics"]["success"] == float(reward == 1.0)


def test_each_page_allows_only_its_own_actions() -> None:
    env = shop(page_chars=100)
    env.reset(0)
    for wrong in ("search[]", "search[ ]", "click[buy now]", "click[description]", "buy", "search"):
        assert env.step(wrong)[4]["metrics"]["action_is_valid"] == 0.0
    env.step("search[no product has this word: xylophonist]")
    text, *_ = env.step("search[tea]")
    assert text == "Page 1 (Total results: 0)" and env.actions == ["click[back to search]"]
    env.step("click[back to search]")
    text, *_ = env.step("search[table]")
    assert len(text) == 100


def test_search_works_on_every_page_like_in_the_original() -> None:
    """web_agent_text_env.py of princeton-nlp/WebShop: a search needs words only, and every page has the instruction."""
    env = shop(turn="Your task: {task}\n{observation}")
    env.reset(0)
    env.step("search[table]")
    results = env.step("search[tea shampoo]")
    env.step(env.actions[3])
    assert env.product is not None
    env.step("click[description]")
    again = env.step("search[tea shampoo]")
    assert again[0] == results[0] and again[0].startswith(f"Your task: {env.goal.text}\nPage 1")
    assert env.product is None and again[4]["metrics"]["action_is_valid"] == 1.0
    assert "Your task: {task}" in WebShopOptions().turn and "Your task: {task}" in WebShopOptions().invalid


def test_the_expert_buys_the_requested_product() -> None:
    env = shop()
    for seed in range(40):
        env.reset(seed)
        for _ in range(20):
            *_, ended, _, info = env.step(env.expert(random.Random(seed), 0.0))
            if ended:
                break
        assert info["metrics"]["success"] == 1.0


def test_every_generated_goal_can_be_reached() -> None:
    for one in catalogue_of(WebShopOptions(num_products=300)).goals:
        assert reward_of(one.product, one, dict(one.options)) == 1.0, one  # type: ignore[arg-type]


def test_validation_goals_are_held_out_and_a_row_may_name_one() -> None:
    shops = catalogue_of(WebShopOptions(**SMALL))
    held = {id(one) for one in shops.goals[:10]}
    drawn = [{id(shops.goal(first + seed)) for seed in range(400)} for first in (0, HALF)]
    assert drawn[1] == held and not drawn[0] & held and len(drawn[0]) > 50
    env = make_env(EnvConfig(name="webshop", options=SMALL | PLAIN), {"extra": {"goal": 4}})
    env.reset(9)
    assert env.goal is shops.goals[4] is catalogue_of(WebShopOptions(**SMALL, tag="")).goals[4]  # type: ignore[attr-defined]
    for wrong in (-1, len(shops.goals), "1", True):
        with pytest.raises(ValueError, match="column goal: "):
            make_env(EnvConfig(name="webshop", options=SMALL), {"extra": {"goal": wrong}})


def test_a_small_generated_catalogue_is_a_prefix_of_a_large_one() -> None:
    items, attributes = generated(300, 7)
    fewer, some = generated(50, 7)
    assert fewer == items[:50] and some.items() <= attributes.items() and generated(50, 8)[0] != fewer
    assert len(products_of(items, attributes)) == 300 and len({one["query"] for one in items}) == 16


def test_files_are_read_and_their_errors_are_named(tmp_path: Path) -> None:
    items, attributes = generated(40, 0)
    paths = {name: str(tmp_path / f"{name}.json") for name in ("items", "attributes", "human")}
    said = {"instruction": "i want it", "instruction_attributes": ["x"], "instruction_options": []}
    good = {"items": items, "attributes": attributes, "human": {one["asin"]: [said] for one in items}}
    for name, content in good.items():
        Path(paths[name]).write_text(json.dumps(content))
    options = WebShopOptions(**paths, held_out=30)  # type: ignore[arg-type]
    assert (
        len(catalogue_of(options).goals) == 40
        and len(catalogue_of(options.model_copy(update={"human": ""})).goals) > 40
    )

    def problem(held_out: int = 30, **changes: Any) -> str:
        config = EnvConfig(name="webshop", options={**paths, "held_out": held_out, "seed": problem.count} | changes)  # type: ignore[attr-defined]
        problem.count += 1  # type: ignore[attr-defined]  # as a catalogue is read once
        with pytest.raises(ValueError, match=r"env\.shop\.options") as caught:
            check_env(config, "shop")
        return str(caught.value)

    problem.count = 1  # type: ignore[attr-defined]
    missing = {"items": str(tmp_path / "none.json")}
    assert problem(**missing) == f"env.shop.options.items: there is no file '{tmp_path}/none.json'"
    config = parse({"env": {"default": {"name": "webshop", "options": {**paths, **missing}}}})
    assert validate_envs(config, {}) == [f"env.default.options.items: there is no file '{tmp_path}/none.json'"]
    assert "held_out: 40 of 40 goals leave none for training" in problem(held_out=40)
    for name, text, expected in (
        ("items", "[", "items.json' cannot be read"),
        ("items", "{}", "items.json' has dict, not a list"),
        ("items", '[{"asin": "B1"}]', "items.json: item 0: KeyError: 'small_description'"),
        (
            "human",
            json.dumps({items[0]["asin"]: [{}]}),
            f"instruction 0 of {items[0]['asin']}: KeyError: 'instruction'",
        ),
    ):
        Path(paths[name]).write_text(text)
        assert expected in problem()
        Path(paths[name]).write_text(json.dumps(good[name]))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"items": "a.json"}, "items and attributes need each other"),
        ({"human": "a.json"}, "human: instructions by people need items and attributes"),
        ({"prompt": "{symbols} {observation}"}, "prompt: there is no field {symbols} (there are: observation, actions"),
        ({"num_products": 0}, "num_products: Input should be greater than or equal to 1"),
    ],
)
def test_wrong_options_are_named_before_the_start(options: dict[str, Any], problem: str) -> None:
    config = parse({"env": {"default": {"name": "webshop", "options": options}}})
    (line,) = validate_envs(config, {})
    assert line.startswith("env.default.options: ") and problem in line
