"""Writes what the documentation lists from the code: run ``python -m tests.docs.write``, or ``make docs``."""

from __future__ import annotations

import re
from pathlib import Path

from autotune.api.catalogue import catalogue
from autotune.reporting.techniques import catalogue_markdown
from tests.docs.technique_table import document

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Write the table of the README, and the page of the techniques."""
    readme = ROOT / "README.md"
    table = catalogue_markdown(catalogue(device="cpu"))
    text = re.sub(
        r"(<!-- catalogue -->\n).*?(<!-- /catalogue -->)",
        lambda found: found[1] + table + found[2],
        readme.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    readme.write_text(text, encoding="utf-8")
    (ROOT / "docs" / "techniques.md").write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
