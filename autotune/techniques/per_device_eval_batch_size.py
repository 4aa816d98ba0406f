"""``per_device_eval_batch_size``: the rows of an evaluation micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import POSITIVE, Option, Technique
from autotune.techniques.trace_impact import GROWING_SIZES


class PerDeviceEvalBatchSize(Technique):
    """Rows per evaluation micro-batch, which computes no gradients; it changes neither training nor its speed."""

    summary = "Rows per micro-batch of evaluation, any number."
    options = (Option(8, "any number of rows", family=POSITIVE),)
    needs = "rows to evaluate on (`--eval-dataset`, `--eval-split`)"
    impact = GROWING_SIZES

    def matters(self, setting: Setting) -> bool:
        """Return whether training is evaluated."""
        return setting.workload.evaluation is not None

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason if training is not evaluated, for any choice but TRL's default."""
        if self.matters(setting) or choice == self.trl_default:
            return None
        return "there are no rows to evaluate on (--eval-dataset, --eval-split)"

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Return TRL's default if training is not evaluated."""
        return choice if self.matters(setting) else self.trl_default

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """Return the choice or, without evaluation, the training rows, since TRL's default of 8 might not fit."""
        rows = choice if self.matters(setting) else candidate["per_device_train_batch_size"]
        return {"args.per_device_eval_batch_size": int(rows)}
