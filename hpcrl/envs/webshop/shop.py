"""The pages of the shop, and what a click does."""

from __future__ import annotations

import re

from hpcrl.envs.games.game import ExpertGame, OpenGame, Outcome
from hpcrl.envs.spec import WebShopOptions
from hpcrl.envs.webshop.catalogue import catalogue_of
from hpcrl.envs.webshop.products import Goal, Product
from hpcrl.envs.webshop.purchase_reward import reward_of

NUM_RESULTS, NUM_ON_PAGE = 50, 10
BACK, NEXT, PREVIOUS, BUY = "back to search", "next >", "< prev", "buy now"
DETAILS = ("description", "features", "attributes")
SEARCH = "search[...]"


class WebShop(OpenGame[WebShopOptions], ExpertGame[WebShopOptions]):
    """The shop of arXiv 2207.01206 in its text mode: search[words] and click[item of the page] on every page, without
    its empty reviews. Buying ends the episode with the reward of hpcrl.envs.webshop.purchase_reward, all other actions
    get 0; success is a reward of 1. The seed chooses the goal, unless the row's column `goal` has its number in the
    original's order."""

    def __init__(self, options: WebShopOptions, goal: int | None = None):
        super().__init__(options)
        self._catalogue = catalogue_of(options)
        if goal is not None and (type(goal) is not int or not 0 <= goal < len(self._catalogue.goals)):
            raise ValueError(f"column goal: {goal!r} is not a number from 0 to {len(self._catalogue.goals) - 1}")
        self._given_goal = goal
        self.product: Product | None = None
        self.chosen: dict[str, str] = {}
        """Option -> chosen value, of the current product."""

    def start(self, seed: int) -> None:
        number = self._given_goal
        self.goal: Goal = self._catalogue.goal(seed) if number is None else self._catalogue.goals[number]
        self.task = self.goal.text
        self._found: list[Product] = []
        self._shown = 0
        self._open("search")

    def show(self) -> str:
        return self._text[: self.options.page_chars]

    def act(self, action: str) -> Outcome:
        before = self._text, dict(self.chosen)
        what, word = action[:-1].split("[", 1)
        if what == "search":
            found = self._catalogue.search.find(word, NUM_RESULTS)
            self._found, self._shown = [self._catalogue.products[number] for number in found], 0
            self._open("results")
        elif word == BUY:
            assert self.product is not None, "only a product's page has this button"
            reward = reward_of(self.product, self.goal, self.chosen)
            return Outcome(reward, ended=True, success=reward == 1.0)
        else:
            self._click(word)
        return Outcome(0.0, effective=before != (self._text, self.chosen))

    def best_action(self) -> str:
        """Search for the goal's product, open the first full match or the last page's best one, choose options, buy."""
        if self._page == "search":
            return f"search[{' '.join([self.goal.product.query, *self.goal.attributes, *self._wanted()])}]"
        if self._page == "results":
            worth = {product.asin.lower(): self._worth(product) for product in self._on_page()}
            best = max(worth, key=lambda asin: worth[asin], default=BACK)
            return f"click[{NEXT}]" if worth.get(best, 0) < 1 and self._has_next() else f"click[{best}]"
        if self._page != "item":
            return f"click[{PREVIOUS}]"
        missing = [value for value in self._wanted() if value in self._values() and value not in self.chosen.values()]
        return f"click[{missing[0] if missing else BUY}]"

    def _wanted(self) -> list[str]:
        """The values of the goal's options."""
        return [option if isinstance(option, str) else option[1] for option in self.goal.options]

    def _worth(self, product: Product) -> float:
        """The reward of a product with the goal's options that it offers."""
        has = {value: name for name, values in product.options.items() for value in values}
        return reward_of(product, self.goal, {has[value]: value for value in self._wanted() if value in has})

    def _chosen(self, response: str) -> str | None:
        given = super()._chosen(response)
        if given is not None:
            return given
        searched = re.fullmatch(r"search\[(.*\S.*)\]", self._given(response) or "", re.DOTALL | re.IGNORECASE)
        return f"search[{searched[1]}]" if searched else None

    def _click(self, word: str) -> None:
        if word == BACK:
            self._open("search")
        elif word in (NEXT, PREVIOUS) and self._page == "results":
            self._shown += NUM_ON_PAGE if word == NEXT else -NUM_ON_PAGE
            self._open("results")
        elif word == PREVIOUS:
            self._open("results" if self._page == "item" else "item")
        elif self._page == "results":
            self.product = self._catalogue.products[self._catalogue.number[word]]
            self._open("item")
        elif word in self._values():
            self.chosen[self._values()[word]] = word
            self._open("item")
        else:
            self._open(word)

    def _open(self, page: str) -> None:
        """Go to a page: set its text and its actions."""
        self._page = page
        if page in ("search", "results"):
            self.product, self.chosen = None, {}
        clicks: list[str] = []
        if page == "search":
            self._text = "Search"
        elif page == "results":
            self._text, clicks = self._results()
        elif page == "item":
            self._text, clicks = self._item()
        else:
            assert self.product is not None, "only a product has these pages"
            shown = {"description": [self.product.description], "features": self.product.features}
            said = shown.get(page, self.product.attributes)
            self._text, clicks = "\n".join([f"{page.capitalize()} of {self.product.name}", *said]), [BACK, PREVIOUS]
        self.actions = [SEARCH] if page == "search" else list(dict.fromkeys(f"click[{name}]" for name in clicks))

    def _results(self) -> tuple[str, list[str]]:
        lines = [f"Page {self._shown // NUM_ON_PAGE + 1} (Total results: {len(self._found)})"]
        lines += [f"{product.asin} | {product.name} | {product.price_tag}" for product in self._on_page()]
        clicks = [BACK, *([PREVIOUS] if self._shown else []), *([NEXT] if self._has_next() else [])]
        return "\n".join(lines), [*clicks, *(product.asin.lower() for product in self._on_page())]

    def _item(self) -> tuple[str, list[str]]:
        product = self.product
        assert product is not None, "an item's page has a product"
        lines = [product.name, f"Price: {product.price_tag}"]
        lines += [f"{name}: {', '.join(values)}" for name, values in product.options.items()]
        lines += [f"You have chosen {name}: {value}" for name, value in self.chosen.items()]
        details = DETAILS if self.options.show_attributes else DETAILS[:2]
        return "\n".join(lines), [BACK, PREVIOUS, *details, *self._values(), BUY]

    def _values(self) -> dict[str, str]:
        """Value -> option of the product."""
        options = self.product.options if self.product is not None else {}
        return {value: name for name, values in options.items() for value in values}

    def _on_page(self) -> list[Product]:
        return self._found[self._shown : self._shown + NUM_ON_PAGE]

    def _has_next(self) -> bool:
        return self._shown + NUM_ON_PAGE < len(self._found)
