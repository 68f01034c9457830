"""Builds the docs site (`make site`): pages keep their paths in the repository, and every link is checked afterwards.

`python docs/site/build.py FOLDER` replaces the folder by the site. Exit code 1, with the folder as it was, if a link or
an anchor leads nowhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from check import problems_of

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).with_name("mkdocs.yml")
ASSETS = (".css", ".js", ".png", ".svg", ".webp")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#:]+)\)")
LIST = re.compile(r"[-*] |1\. ")
KEY_ROW = re.compile(r"^\| `([\w.]+)` \|", re.M)


def pages() -> set[str]:
    """Paths of all Markdown files below docs/, and of those that the navigation names."""
    below = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    return below | set(re.findall(r": (\S+\.md)$", CONFIG.read_text(), re.M))


def rewritten(path: str, text: str, on_site: set[str]) -> str:
    """A page as the site has it. Links to other files become their paths: the repository has no public address. Every
    key of the reference can be linked to (configuration.html#trainer.lr)."""

    def plain(link: re.Match[str]) -> str:
        words, target = link.groups()
        found = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if found in on_site or not (ROOT / found).exists():
            return link[0]
        return words if found in words else f"{words} (`{found}`)"

    if path == "docs/configuration.md":
        text = KEY_ROW.sub(r'| <span id="\1"></span>`\1` |', text)
    return LINK.sub(plain, "\n".join(_lists_apart(text.split("\n"))))


def _lists_apart(lines: list[str]) -> Iterator[str]:
    """Lines with an empty one between a paragraph and a list, which forges do not need."""
    code = paragraph = False
    for line in lines:
        code ^= line.startswith("```")
        begins = not code and LIST.match(line) is not None
        if begins and paragraph:
            yield ""
        paragraph = not begins and (paragraph if line.startswith(" ") else bool(line) and line[0] not in "`|#")
        yield line


def stage(folder: Path) -> None:
    """Fill a folder with what the generator reads."""
    names = pages()
    assets = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*") if path.suffix in ASSETS}
    for name in sorted(names | assets):
        target = folder / "pages" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name in assets:
            shutil.copyfile(ROOT / name, target)
        else:
            target.write_text(rewritten(name, (ROOT / name).read_text(), names))
    shutil.copyfile(CONFIG, folder / "mkdocs.yml")
    (folder / "hpcrl").symlink_to(ROOT / "hpcrl")  # the docstrings


def main(output: Path) -> int:
    """Build, check and put in place. The exit code."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        stage(folder)
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        if subprocess.run(command, cwd=folder, check=False).returncode:
            return 1
        problems = problems_of(folder / "site")
        print(*problems, sep="\n", end="\n" if problems else "")
        if problems:
            return 1
        shutil.rmtree(output, ignore_errors=True)
        shutil.move(folder / "site", output)
    print(f"site      {output / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
