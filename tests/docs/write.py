"""Writes the generated part of the documentation: ``python -m tests.docs.write``, or ``make docs``."""

from __future__ import annotations

from pathlib import Path

from tests.docs.technique_table import document

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Write the page of the techniques."""
    (ROOT / "docs" / "techniques.md").write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
