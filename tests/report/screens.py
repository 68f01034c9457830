"""Make the screens of the report in docs/plots from a run, such as that of `make demo`.

python -m tests.report.screens runs/demo
"""

from __future__ import annotations

import sys
from pathlib import Path

from hpcrl.report.page import page
from hpcrl.report.run_files import RunFiles
from tests.conftest import ROOT
from tests.report.browser import Browser

SECTIONS = ("overview", "curves", "samples", "timeline")
WIDTH, HEIGHT = 1100, 760


def main(run: Path, folder: Path) -> None:
    """Write report_SECTION.webp of a run's report into a folder."""
    file = folder / "report.html"
    file.write_text(page([RunFiles(run)]), encoding="utf-8", errors="replace")
    try:
        with Browser() as browser:
            browser.resize(WIDTH, HEIGHT)
            for name in SECTIONS:
                browser.open(f"{file.as_uri()}#{name}")
                browser.picture(folder / f"report_{name}.webp")
    finally:
        file.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), ROOT / "docs" / "plots")
