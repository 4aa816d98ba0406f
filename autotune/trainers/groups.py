"""The base of GRPO and RLOO: several completions of each prompt form a group, scored by reward functions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import gcd
from typing import ClassVar

from autotune.core.candidate import Candidate
from autotune.core.plan import TrainingPlan
from autotune.core.program import StepProgram
from autotune.core.rows.batch_geometry import BatchGeometry, Layout, Shape
from autotune.core.rows.documents import Documents
from autotune.core.setting import Setting
from autotune.core.workload import UNUSED_COLUMNS, Workload
from autotune.errors import InputError
from autotune.techniques.traits import MAX_TRACED
from autotune.trainers.declared import ConfigFields, DatasetFormat
from autotune.trainers.generating import GENERATING_FIELDS, Generating
from autotune.trainers.prompts import GENERATION, REFERENCE_PASS, SCORING
from autotune.units import plural

_TOGETHER, _BATCH = "steps_per_generation", "generation_batch_size"
"""The fields for the size of a generation batch: micro-batches per process, and completions over all processes."""
OLD_PASS = "old log-probabilities"
"""The forward pass, without gradients, that computes the old log-probabilities of completions."""
GROUPS_FIELDS = GENERATING_FIELDS | ConfigFields(
    traced=frozenset({
        "epsilon", "epsilon_high", "mask_truncated_completions", "num_generations_eval", "reward_weights",
        "router_aux_loss_coef", "sync_ref_model",
    }),
    # The class fills in steps_per_generation from generation_batch_size, and the other way round.
    without_effect=frozenset({
        "generation_batch_size", "log_multimodal", "ref_model_mixup_alpha", "ref_model_sync_steps",
    }),
    others=frozenset({
        "beta", "num_generations", "num_iterations", "steps_per_generation", "transformers_continuous_batching_config",
        "use_transformers_continuous_batching", "use_transformers_paged",
    }),
    # Reward functions read the columns.
    reading=frozenset({UNUSED_COLUMNS}),
)  # fmt: skip
"""The fields of GRPO's and RLOO's configurations."""


class Groups(Generating):
    """Prompts, each with a group of completions that are compared with one another."""

    formats = (DatasetFormat("prompt", ("prompt",), with_images=True),)
    takes_images = True
    at_once: ClassVar[tuple[str, ...]] = (GENERATION, SCORING)
    in_chunks: ClassVar[tuple[str, ...]] = (OLD_PASS, REFERENCE_PASS)

    @abstractmethod
    def compares_with_old(self, plan: TrainingPlan, *, aligned: bool) -> bool:
        """Return whether the old log-probabilities are computed.

        Args:
            aligned: whether every optimizer step begins with completions of the current model.
        """

    def evaluation_geometry(self, plan: TrainingPlan, documents: Documents, rows: int) -> BatchGeometry:
        """Return the geometry of evaluation, which has its own group size."""
        # Each micro-batch of evaluation generates its own completions once.
        training = dict.fromkeys(("steps_per_generation", "num_iterations"))
        groups = {**training, "num_generations": self.copies(plan, evaluated=True)}
        return super().evaluation_geometry(replace(plan, args={**plan.args, **groups}), documents, rows)

    def copies(self, plan: TrainingPlan, *, evaluated: bool = False) -> int:
        """Return the completions per prompt; evaluation may have another number (``num_generations_eval``)."""
        own = plan.number("num_generations_eval") if evaluated else None
        return own or plan.count("num_generations")

    def traced_plan(self, plan: TrainingPlan, layout: Layout, shape: Shape) -> TrainingPlan:
        """Return a plan for a trace, in which generations begin with steps or not, as in the plan.

        Old log-probabilities are computed if the plan computes them. Dataset rows of the shape are those of a whole
        generation batch of the plan.
        """
        traced = super().traced_plan(plan, layout, shape)
        args, own_rows = dict(traced.args), bool(shape.chosen) and not shape.evaluated
        # Further micro-batches need more memory than the first. That of an evaluation may form no groups alone.
        fewest = 1 if shape.rows == plan.rows else MAX_TRACED
        alone = plan.micro_batches == 1 and (own_rows or plan.steps_per_generation > 1 or fewest == 1)
        batch = plan.steps_per_generation if own_rows else max(self.traced_together(plan), fewest)
        iterations = 1 if alone or batch > 1 else MAX_TRACED
        completions = shape.rows * batch * plan.data_ranks
        groups = gcd(self.copies(plan), completions) if own_rows or batch == 1 else batch
        uses = batch * iterations
        micro_batches = 1 if alone else uses
        if plan.generates_within_steps:
            # Two generations in a step; unless the plan is aligned, the second is in part for the next step.
            micro_batches += uses if _aligned(plan) else 1
        elif not _aligned(plan) and micro_batches % uses == 0:
            # A generation for two steps.
            iterations *= 2
        args |= {
            "steps_per_generation": batch,
            "num_generations": groups,
            "num_iterations": iterations,
            "gradient_accumulation_steps": micro_batches,
        }
        if plan.evaluates:
            # One group per micro-batch, for any number of rows.
            args["num_generations_eval"] = shape.rows
        return replace(traced, args=args)

    def phases(self, plan: TrainingPlan) -> StepProgram:
        """Return a program in which generations come before the micro-batches that train on them."""
        old = self.compares_with_old(plan, aligned=_aligned(plan))
        reference = (REFERENCE_PASS,) if plan.args.get("beta") else ()
        generation = (GENERATION, *((OLD_PASS,) if old else ()), *reference, SCORING)
        if plan.generates_within_steps:
            return StepProgram(leading=generation)
        return StepProgram(in_step=generation)

    def runs_by_command(self, plan: TrainingPlan) -> bool:
        """Return whether ``trl NAME --config`` accepts a plan: a single process must evaluate whole groups.

        The command builds the configuration before it starts the processes, and counts only itself (TRL 1.16,
        ``trl/cli/commands/training.py``).
        """
        return super().runs_by_command(plan) and self._broken_evaluation(plan, ranks=1) is None

    def written_args(self, plan: TrainingPlan, keys: Collection[str] = ()) -> Mapping[str, object]:
        """Return the arguments with ``generation_batch_size`` if a single process has no whole groups."""
        if _BATCH not in keys and self._broken_generation(plan, ranks=1) is None:
            return plan.args
        completions = self.padded_together(plan) * plan.data_ranks
        return {**{name: value for name, value in plan.args.items() if name != _TOGETHER}, _BATCH: completions}

    def as_read(self, plan: TrainingPlan, keys: Mapping[str, object]) -> TrainingPlan:
        """Return a plan with ``steps_per_generation`` computed from ``generation_batch_size``.

        Raises:
            InputError: the batch cannot be divided into micro-batches.
        """
        completions, at_once = keys.get(_BATCH), plan.rows * plan.data_ranks
        if not isinstance(completions, int):
            return plan
        if completions % at_once:
            raise InputError(
                f"{_BATCH}: {completions} cannot be divided into micro-batches of {plan.rows} rows of"
                f" {plan.data_ranks} processes.",
                hint=f"Write a multiple of {at_once}, or give another --num-processes.",
            )
        return replace(plan, args={**plan.args, _TOGETHER: completions // at_once})

    def rule(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return why TRL cannot train by the plan of a candidate, or mixes completions of two models in a step."""
        plan = self.plan(candidate, setting)
        if refused := self.refused(plan, setting.workload):
            return refused
        alone = self._broken_evaluation(plan, ranks=1)
        if setting.base is not None and alone is not None:
            return f"`trl {self.name}` reads the edited {setting.base.file} in one process, and there {alone}"
        uses, micro_batches = plan.micro_batches_per_generation, plan.micro_batches
        if micro_batches % uses and uses % micro_batches:
            return (
                f"{uses} micro-batches are trained on one generation, which is neither a divisor nor a multiple of the "
                f"{micro_batches} of an optimizer step"
            )
        return None

    def refused(self, plan: TrainingPlan, workload: Workload) -> str | None:
        """Return why generation or evaluation has no whole groups of completions, or too few prompts."""
        ranks = plan.data_ranks
        broken = self._broken_generation(plan, ranks) or self._broken_evaluation(plan, ranks)
        return broken or super().refused(plan, workload)

    def _broken_generation(self, plan: TrainingPlan, ranks: int) -> str | None:
        """Return why a generation batch of ``ranks`` processes has no whole groups, or None."""
        completions = self.padded_together(plan) * ranks
        batch = f"a generation batch of {plural(completions, 'completion')}"
        return _broken_groups(batch, completions, self.copies(plan))

    def _broken_evaluation(self, plan: TrainingPlan, ranks: int) -> str | None:
        """Return why an evaluation batch of ``ranks`` processes has no whole groups, or None."""
        completions = plan.count("per_device_eval_batch_size") * ranks if plan.evaluates else 0
        batch = f"an evaluation batch of {plural(completions, 'completion')} (per_device_eval_batch_size)"
        return _broken_groups(batch, completions, self.copies(plan, evaluated=True))


def _broken_groups(batch: str, completions: int, copies: int) -> str | None:
    if completions % copies == 0:
        return None
    return f"{batch} cannot be divided into groups of the {copies} completions of one prompt (num_generations)"


def _aligned(plan: TrainingPlan) -> bool:
    """Whether every optimizer step begins with completions of the current model (trl/trainer/grpo_trainer.py)."""
    return plan.micro_batches % plan.micro_batches_per_generation == 0
