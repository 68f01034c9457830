"""Checks a built site: links and anchors lead somewhere inside it, and a browser that shows it asks no other host."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}
"""Tags and attributes of what a browser loads by itself; `a` it only follows."""
NOT_LOADED = {"canonical", "next", "prev", "alternate"}
"""Values of `rel` of a link that a browser does not load."""
IN_STYLES = re.compile(r"url\(\s*[\"']?(https?:)?//|@import\s+[\"'](https?:)?//")


class Page(HTMLParser):
    """What a page links to and loads, and its anchors."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors: set[str] = set()
        self.followed: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect from one tag."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        for name, value in given.items():
            if (tag, name) in LOADED and given.get("rel") not in NOT_LOADED:
                self.loaded.append(value)
            elif tag == "a" and name == "href":
                self.followed.append(value)


def problems_of(site: Path) -> list[str]:
    """One line for each link, anchor or request that is wrong; empty if there is none."""
    site = site.resolve()
    found = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    problems = [] if found else [f"{site}: no pages"]
    for path, page in found.items():
        name = path.relative_to(site)
        for link in page.loaded:
            if urlsplit(link).netloc:
                problems.append(f"{name}: loads {link} from another host")
        for link in dict.fromkeys([*page.followed, *page.loaded]):
            problems += [f"{name}: {link}: {why}" for why in _wrong(link, path, site, found)]
    for path in site.rglob("*.css"):
        if IN_STYLES.search(path.read_text()):
            problems.append(f"{path.relative_to(site)}: loads from another host")
    return problems


def _wrong(link: str, path: Path, site: Path, found: dict[Path, Page]) -> list[str]:
    parts = urlsplit(link)
    if parts.netloc or parts.scheme in ("data", "mailto"):
        return []
    if parts.path.startswith("/") and path.name == "404.html":  # shown at any depth, so that its links are absolute
        return []
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.is_relative_to(site) or not target.is_file():
        return ["no such file"]
    anchor = unquote(parts.fragment)
    if anchor and target in found and anchor not in found[target].anchors:
        return ["no such anchor"]
    return []
