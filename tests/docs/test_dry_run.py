"""docs/dry-run.md has every outcome and key of a dry run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autotune.core.dry_run import EXIT_CODES, DryRun, Ending, FailedAllocation, Followed, Loader, Place, Refused, Span

TEXT = (Path(__file__).parents[2] / "docs" / "dry-run.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", [DryRun, Followed, Span, Loader, FailedAllocation, Place, Refused, Ending])
def test_every_key_is_named(kind: type) -> None:
    assert [field.name for field in dataclasses.fields(kind) if f"`{field.name}`" not in TEXT] == []


def test_every_outcome_is_named() -> None:
    keys = TEXT.partition("## The document of `--json`")[2]
    assert [outcome.value for outcome in EXIT_CODES if f"`{outcome.value}`" not in keys] == []
