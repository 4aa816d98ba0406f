"""The report of ``autotune techniques``: every knob with its choices, and what this machine does not support."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autotune.core.catalogue import CatalogueOption, CatalogueRow
from autotune.reporting.document import Block, Document, Facts, Listing, Section

_CHANGES = "changes-training"


def techniques_report(rows: Iterable[CatalogueRow]) -> Document:
    """Return the catalogue of techniques."""
    return Document(None, tuple(Section(row.knob, tuple(_blocks(row))) for row in rows))


def _blocks(row: CatalogueRow) -> Iterator[Block]:
    facts = (
        f"default: {row.default}",
        f"needs: {row.needs}" if row.needs else "",
        f"--allow {row.knob}: {row.changes}" if row.changes else "",
        "" if row.in_default_space else "not in the default search space",
    )
    yield Listing(tuple(filter(None, facts)), f"{row.knob}  {row.summary}")
    unavailable = frozenset(str(option.choice) for option in row.options if not option.available)
    yield Facts(tuple((str(option.choice), _summary(option)) for option in row.options), unavailable)


def _summary(option: CatalogueOption) -> str:
    changes = " (changes training)" if option.effect == _CHANGES else ""
    missing = "" if option.available else f" (not here: {option.reason})"
    return f"{option.summary}{changes}{missing}"
