"""``per_device_train_batch_size``: the rows of a micro-batch; gradient accumulation provides the global batch."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import GLOBAL_BATCH, Setting
from autotune.techniques.base import POSITIVE, Option, Technique
from autotune.techniques.context_parallel import data_ranks
from autotune.techniques.packing import NONE, documents_per_row
from autotune.techniques.trace_impact import GROWING_SIZES
from autotune.units import format_share, plural

ROWS = "per_device_train_batch_size"
"""The name of the technique."""
NEAR_STEP = 0.10
"""Relative deviation allowed for the documents of a packed optimizer step: rows hold varying numbers of documents."""


def rows_per_step(candidate: Candidate, setting: Setting) -> int:
    """Return the rows of an optimizer step in one process that hold the requested documents.

    With one document per row, it is the number of documents. With packed rows, it is the multiple of the micro-batch
    size that comes closest.
    """
    rows = int(candidate[ROWS])
    documents = setting.global_batch_size / data_ranks(candidate, setting)
    return rows * max(1, round(documents / (rows * _documents_per_row(candidate, setting))))


def documents_per_step(candidate: Candidate, setting: Setting) -> float:
    """Return the mean number of documents in an optimizer step, over all processes."""
    return rows_per_step(candidate, setting) * data_ranks(candidate, setting) * _documents_per_row(candidate, setting)


class PerDeviceTrainBatchSize(Technique):
    """Rows per micro-batch; gradient accumulation provides the rest of the global batch, counted in documents."""

    summary = "Rows per micro-batch, any number; gradient accumulation adapts to keep the global batch."
    options = (Option(8, "any number of rows up to the global batch", family=POSITIVE),)
    writes = frozenset({"args.per_device_train_batch_size", "args.gradient_accumulation_steps"})
    impact = GROWING_SIZES

    def default(self, setting: Setting) -> Choice:
        """Return TRL's default, or the largest smaller size that divides the global batch."""
        largest = max(1, min(int(self.trl_default), setting.documents_per_process))
        return next(rows for rows in range(largest, 0, -1) if setting.documents_per_process % rows == 0)

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason if a micro-batch would exceed the user's global batch, at one document or more per row."""
        if int(choice) > setting.documents_per_process and GLOBAL_BATCH not in setting.allowed:
            return f"a global batch has {plural(setting.documents_per_process, 'row')} for each process"
        return None

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if a step does not hold the requested documents, exactly or, if packed, approximately."""
        if GLOBAL_BATCH in setting.allowed:
            return None
        if candidate.get("packing", NONE) == NONE:
            ranks = data_ranks(candidate, setting)
            documents, left = divmod(setting.global_batch_size, ranks)
            if left:
                together = plural(setting.global_batch_size, "document")
                return f"a global batch of {together} is not a multiple of {ranks} processes"
            if documents % int(choice) == 0:
                return None
            return f"{choice} rows do not divide the {documents} documents of a global batch"
        held, requested = documents_per_step(candidate, setting), setting.global_batch_size
        if abs(held / requested - 1) <= NEAR_STEP:
            return None
        rows = rows_per_step(candidate, setting) * data_ranks(candidate, setting)
        packed = f"{plural(rows, 'packed row')} of {int(candidate['max_length']):,} tokens"
        return (
            f"{packed} {'holds' if rows == 1 else 'hold'} {held:,.1f} documents, and an optimizer step needs "
            f"{requested:,} ±{format_share(NEAR_STEP)} (--allow {GLOBAL_BATCH})"
        )

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {
            "args.per_device_train_batch_size": int(choice),
            "args.gradient_accumulation_steps": rows_per_step(candidate, setting) // int(choice),
        }


def _documents_per_row(candidate: Candidate, setting: Setting) -> float:
    """Return the mean number of documents in a row of the trainer."""
    packing = str(candidate.get("packing", NONE))
    if packing == NONE:
        return 1.0
    return documents_per_row(setting.workload.dataset.documents, packing, int(candidate["max_length"]))
