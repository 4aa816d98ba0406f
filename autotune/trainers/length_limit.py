"""What a trainer's maximum length keeps of the rows."""

from __future__ import annotations

from autotune.core.candidate import Candidate
from autotune.core.documents.length_report import LengthLimit
from autotune.core.setting import Setting
from autotune.techniques.base import facts
from autotune.techniques.max_length import MaxLength, is_unlimited, limit_with
from autotune.techniques.packing import NONE
from autotune.trainers.base import Trainer


def limits_rows(trainer: Trainer) -> bool:
    """Return whether a trainer has a ``max_length`` that cuts or drops rows of the dataset."""
    return MaxLength.name in trainer.fields and not facts(MaxLength, trainer.name).changes


def length_limit(trainer: Trainer, setting: Setting, candidate: Candidate) -> LengthLimit | None:
    """Return the tokens and rows that a candidate's maximum length keeps; None if none applies to rows."""
    if not limits_rows(trainer) or is_unlimited(candidate["max_length"], candidate, setting):
        return None
    documents = setting.workload.dataset.documents
    return limit_with(documents, int(candidate["max_length"]), candidate.get("packing", NONE))
