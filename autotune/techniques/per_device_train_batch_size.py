"""``per_device_train_batch_size``: how the rows of an optimizer step are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.errors import InputError
from autotune.techniques.base import Option, Technique


class PerDeviceTrainBatchSize(Technique):
    """Rows per micro-batch; accumulation makes up the rest of the global batch."""

    name = "per_device_train_batch_size"
    summary = "Rows per micro-batch; gradient accumulation follows, so that the global batch stays."
    options = (Option(8, "any number of rows that divides the global batch"),)
    trl_default = 8
    writes = frozenset(
        {"args.per_device_train_batch_size", "args.per_device_eval_batch_size", "args.gradient_accumulation_steps"}
    )
    ordered = True
    only_sizes = True
    patches_libraries = False

    def default(self, setting: Setting) -> Choice:
        """TRL's own, or the largest below it that divides the global batch."""
        largest = min(int(self.trl_default), setting.rows_per_process)
        return next(rows for rows in range(largest, 0, -1) if setting.rows_per_process % rows == 0)

    def parse(self, text: Choice, setting: Setting | None = None) -> Choice:
        """Return a number of rows, at least one."""
        if str(text).isdigit() and int(text) > 0:
            return int(text)
        raise InputError(f"{text!r} is no choice of {self.name}.", hint="It takes a number of rows.")

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """The global batch is the user's."""
        if setting.rows_per_process % int(choice):
            return f"it does not divide the {setting.rows_per_process} rows that each process has in a global batch"
        return None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """Evaluation would run at TRL's default of 8 rows, whatever training was found to fit."""
        return {
            "args.per_device_train_batch_size": int(choice),
            "args.per_device_eval_batch_size": int(choice),
            "args.gradient_accumulation_steps": setting.rows_per_process // int(choice),
        }


TECHNIQUE = PerDeviceTrainBatchSize()
