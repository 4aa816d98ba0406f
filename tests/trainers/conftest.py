"""Fixtures of the conformance suite: sample rows, prepared once for each format of each trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.trainers.base import Trainer
from tests.trainers.prepared import Prepare, Prepared, prepared_sample


@pytest.fixture(scope="session")
def prepared(small_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepare:
    """A function that returns a trainer's sample rows of a format, prepared by the trainer's real job."""
    known: dict[tuple[str, str], Prepared] = {}

    def of(trainer: Trainer, form: str) -> Prepared:
        key = (trainer.name, form)
        if key not in known:
            known[key] = prepared_sample(trainer, form, small_model_directory, tmp_path_factory.mktemp(trainer.name))
        return known[key]

    return of
