"""Full-text search over products with SQLite's FTS5 module."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Sequence

from hpcrl.envs.webshop.products import Product

MAX_WORDS = 64
"""Maximum words of a query; later words are ignored."""
FUNCTION_WORDS = """
a an and are as at be but by for from i if in into is it me my no not of on or s such t that the their then
there  these they this to want was will with would need find looking look am please
"""
STOP_WORDS = frozenset(FUNCTION_WORDS.split())


class Search:
    """The products whose text shares words with a query, the best by BM25 first (k1 1.2, b .75, Porter's stemmer).

    The text is the original index's: name, description, first feature and options. The original uses Lucene (k1 .9,
    b .4), whose order differs.
    """

    def __init__(self, products: Sequence[Product]):
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._lock = threading.Lock()
        table = "create virtual table products using fts5(text, content='', tokenize='porter unicode61')"
        self._database.execute(table)
        rows = ((number, _text(product)) for number, product in enumerate(products))
        self._database.executemany("insert into products(rowid, text) values (?, ?)", rows)
        self._database.execute("insert into products(products) values ('optimize')")

    def find(self, query: str, most: int) -> list[int]:
        """The numbers of at most this many products; none if the query has only function words."""
        words = dict.fromkeys(word for word in re.findall(r"[^\W_]+", query.lower()) if word not in STOP_WORDS)
        if not words:
            return []
        any_of = " OR ".join(f'"{word}"' for word in [*words][:MAX_WORDS])
        ask = "select rowid from products where products match ? order by bm25(products), rowid limit ?"
        with self._lock:
            return [number for (number,) in self._database.execute(ask, (any_of, most))]


def _text(product: Product) -> str:
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    text = " ".join([product.name, product.description, *product.features[:1], options])
    return text.encode(errors="replace").decode()
