"""``per_device_eval_batch_size``: the rows of a micro-batch of evaluation."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.program import EVALUATE
from autotune.core.setting import Setting
from autotune.errors import InputError
from autotune.techniques.base import Option, Technique


class PerDeviceEvalBatchSize(Technique):
    """Rows per micro-batch of evaluation, which computes no gradients; it changes neither training nor its speed."""

    name = "per_device_eval_batch_size"
    summary = "Rows per micro-batch of evaluation, any number."
    options = (Option(8, "any number of rows, where there are rows to evaluate on"),)
    trl_default = 8
    writes = frozenset({"args.per_device_eval_batch_size"})
    needs = "rows to evaluate on (`--eval-dataset`, `--eval-split`)"
    ordered = True
    only_sizes = True
    only_in = EVALUATE
    patches_libraries = False

    def parse(self, text: Choice, setting: Setting | None = None) -> Choice:
        """Return a number of rows, at least one."""
        if str(text).isdigit() and int(text) > 0:
            return int(text)
        raise InputError(f"{text!r} is no choice of {self.name}.", hint="It takes a number of rows.")

    def matters(self, setting: Setting) -> bool:
        """Return whether training is evaluated."""
        return setting.workload.evaluation is not None

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason where training is not evaluated, for any choice but TRL's default."""
        if self.matters(setting) or choice == self.trl_default:
            return None
        return "there are no rows to evaluate on (--eval-dataset, --eval-split)"

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Return TRL's default where training is not evaluated."""
        return choice if self.matters(setting) else self.trl_default

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """Return the choice or, without evaluation, the rows of training, since TRL's default of 8 might not fit."""
        rows = choice if self.matters(setting) else candidate["per_device_train_batch_size"]
        return {"args.per_device_eval_batch_size": int(rows)}


TECHNIQUE = PerDeviceEvalBatchSize()
