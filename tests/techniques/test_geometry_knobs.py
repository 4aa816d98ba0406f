"""Techniques that change a plan's batch geometry declare it, since a base may have no unknown choice of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.candidate import Candidate
from autotune.core.setting import GLOBAL_BATCH
from autotune.errors import InputError
from autotune.trainers import trainers
from autotune.trainers.base import Trainer
from tests.settings import GPU, setting, workload


@pytest.mark.parametrize("trainer", trainers().values(), ids=lambda item: item.name)
def test_no_other_technique_changes_the_geometry(trainer: Trainer) -> None:
    allowed = frozenset({GLOBAL_BATCH, *(item.name for item in trainer.techniques)})
    here = setting(machine=GPU, of=workload(trainer=trainer.name), global_batch_size=16, allowed=allowed)
    baseline = trainer.defaults(here)

    def geometry(candidate: Candidate) -> object:
        found = trainer.geometry(trainer.plan(candidate, here), here.workload.dataset.documents)
        # Which phases there are is told by the step program, and which of them count by the traces.
        return replace(found, phases=())

    for item in trainer.techniques:
        if item.impact.sets_sizes:
            continue
        for option in item.options:
            try:
                choice = item.parse(option.choice, here)
            except InputError:
                continue
            assert geometry(baseline.but(**{item.name: choice})) == geometry(baseline), (item.name, choice)
