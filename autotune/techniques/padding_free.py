"""``padding_free``: the rows of a micro-batch concatenated into one, instead of padded."""

from __future__ import annotations

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import OFF, ON, Equipped, Option, TrainerFacts, differing
from autotune.techniques.max_length import KEEP_END, TRUNCATION
from autotune.techniques.packing import EVALUATION_PACKED, NONE, SEPARATING, never_separated, not_separated
from autotune.techniques.trace_impact import SIZES

DOCUMENT_LENGTHS = "seq_lengths"
"""The column of rows that are packed already: TRL keeps their documents apart with ``padding_free``."""


class PaddingFree(Equipped):
    """TRL's padding-free collator."""

    summary = "Concatenates the rows of a micro-batch, which avoids padding."
    options = (
        Option(OFF, "rows are padded to the longest of their micro-batch"),
        Option(ON, "rows are concatenated"),
    )
    needs = "an architecture and attention that keep packed documents apart (checked)"
    with_images = "TRL refuses it for rows with images"
    by_trainer = differing(dpo=TrainerFacts(without_effect="DPOTrainer warns that it does nothing, and turns it off"))
    impact = SIZES

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Merge both choices for packing strategies with which TRL turns it on (in its trainer's ``__init__``)."""
        return OFF if candidate["packing"] in SEPARATING else choice

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason for rows with images, and unless the self-test passed (law 4)."""
        return super().unsuitable(choice, setting) or (never_separated(setting) if choice == ON else None)

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if concatenated rows would not be separated, or if there is no padding to remove."""
        if choice == OFF or candidate["packing"] in SEPARATING:
            return None
        if candidate["packing"] != NONE:
            return f"padding_free has no effect with packing={candidate['packing']}: its rows have no padding"
        documents_in_rows = DOCUMENT_LENGTHS in setting.workload.dataset.columns
        if candidate["per_device_train_batch_size"] == 1 and not documents_in_rows:
            return "with one row per micro-batch there is no padding to remove"
        cuts = int(candidate["max_length"]) < setting.workload.longest
        if cuts and documents_in_rows:
            return f"padding-free rows are cut before TRL, without the {DOCUMENT_LENGTHS} that keep documents apart"
        if cuts and setting.users_entry(f"args.{TRUNCATION}") == KEEP_END:
            return f"{TRUNCATION}={KEEP_END}: without packing, padding-free rows are cut at their end before TRL"
        if setting.workload.evaluation is not None and setting.users_entry(EVALUATION_PACKED):
            return "eval_packing needs a max_length, which TRL refuses with padding_free if training does not pack"
        return not_separated(candidate, setting)
