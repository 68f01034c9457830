"""Counts of the source tree that a reader notices: names, words, patterns of English, habits.

    python -m tests.bench.counts [REVISION]     e.g. d18ec10; default: HEAD

One JSON line. words and patterns: occurrences in hpcrl/ and in the documents (README.md and docs/, without what is
generated).
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import PurePosixPath
from statistics import median, quantiles

from tests.conftest import ROOT

PATTERNS = ("those of", "that of", "so that", "alone")
WORDS = (
    *("credit", "siblings", "burst", "harvest", "hand-over", "disposition", "intake", "vacate", "tape", "wave"),
    *("fabric", "look_after", "pass_on", "news", "held_out", "held-out"),
)
"""Of findings, where the field has other words."""
NOT_TEXTS = ("docs/configuration.md", "docs/glossary.md", "docs/plots/")


def files_of(revision: str) -> dict[str, str]:
    """Path -> content of the text files of a revision."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        chosen = [m for m in tar if m.isfile() and m.name.endswith((".py", ".md"))]
        return {member.name: tar.extractfile(member).read().decode() for member in chosen}  # type: ignore[union-attr]


def lengths_of(sources: dict[str, str]) -> list[int]:
    """Lines of every function, its docstring and decorators left out."""
    found = []
    for source in sources.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                found.append(body[-1].end_lineno - body[0].lineno + 2 if body else 1)  # type: ignore[operator]
    return found


def occurrences(text: str, words: tuple[str, ...]) -> dict[str, int]:
    """Word -> how often it occurs, as a word or a part of an identifier."""
    return {word: len(re.findall(rf"(?<![a-z]){word}(?![a-rt-z])", text, re.IGNORECASE)) for word in words}


def main() -> None:
    """Print the line."""
    revision = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    files = files_of(revision)
    code = {name: text for name, text in files.items() if name.startswith("hpcrl/") and name.endswith(".py")}
    docs = {name: text for name, text in files.items() if name == "README.md" or name.startswith("docs/")}
    docs = {name: text for name, text in docs.items() if not name.startswith(NOT_TEXTS)}
    modules = Counter(path.name for name in code if (path := PurePosixPath(name)).name != "__init__.py")
    folders = Counter(PurePosixPath(name).parent.name for name in code if name.endswith("/__init__.py"))
    lengths, source, text = lengths_of(code), "\n".join(code.values()), "\n".join(docs.values())
    lines = source.splitlines()
    counts = {
        "revision": revision,
        "lines of hpcrl": len(lines),
        "lines of functions: median, 90 %, longest": [median(lengths), quantiles(lengths, n=10)[-1], max(lengths)],
        "files in the root of hpcrl": sum(name.count("/") == 1 for name in code),
        "module names that occur more than twice": {name: n for name, n in modules.most_common() if n > 2},
        "folders with the name of another": {name: n for name, n in folders.items() if n > 1},
        "words in code": occurrences(source, WORDS),
        "words in documents": occurrences(text, WORDS),
        "patterns in code": occurrences(source, PATTERNS),
        "patterns in documents": occurrences(text, PATTERNS),
        "calls of print": sum(line.lstrip().startswith("print(") for line in lines),
        "lines of comments for each other line": round(
            sum(line.lstrip().startswith("#") for line in lines) / len(lines), 4
        ),
        "docstrings with Args": source.count("Args:\n"),
    }
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
