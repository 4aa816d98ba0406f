"""The base of trainers that generate the completions they train on: a document is a prompt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from autotune.core.batch_geometry import BatchGeometry, Layout, PhaseGeometry, Shape, rounded_up
from autotune.core.candidate import Candidate
from autotune.core.documents import Document, Documents
from autotune.core.lengths import LengthDistribution
from autotune.core.plan import Completions, TrainingPlan
from autotune.core.program import StepProgram, program
from autotune.core.setting import Setting
from autotune.trainers.base import DatasetFormat, Trainer
from autotune.trainers.geometry import micro_batches_of, number, rows_of, widest_of

GENERATION = "generation"
"""The model generates the completions of a generation batch."""
OLD_PASS = "old log-probabilities"
"""The forward pass, without gradients, that later updates of the same completions are compared with."""
REFERENCE_PASS = "reference log-probabilities"
"""The forward pass, without gradients, of the reference: a copy of the model, or the model without its adapters."""
SCORING = "scoring"
"""The reward functions."""

TRACED_GENERATION = 2
"""Micro-batches of the generation batch in a trace: completions of two prompts divide into micro-batches of one row."""
NO_REWARD = "get_soft_overlong_punishment"
"""The reward function that is used if none is named: TRL's own, which only looks at a completion's length."""


class Generating(Trainer):
    """Prompts, each with several completions, which are generated for one or more micro-batches at once.

    Prompts are never cut. A micro-batch is as wide as the longest prompt and the longest completion of its generation
    batch together, since both are padded apart, before the generation batch is divided into micro-batches.
    """

    formats = (DatasetFormat("prompt", ("prompt",)),)
    parts = ("prompt", "completion")
    stand_in: ClassVar[Mapping[str, str]] = {"prompt": "a b"}

    @abstractmethod
    def compares_with_old(self, *, aligned: bool) -> bool:
        """Return whether the old log-probabilities are computed.

        Args:
            aligned: whether every optimizer step begins with completions of the present model.
        """

    def document(self, lengths: tuple[int, ...]) -> Document:
        """Return the prompt, which is kept at any length."""
        return (1, lengths[0])

    def row_of(self, tokens: int) -> tuple[tuple[int, ...], int]:
        """Return a prompt of so many tokens."""
        return (tokens, 0), tokens

    def geometry(self, plan: TrainingPlan, documents: Documents) -> BatchGeometry:
        """Return the geometry of prompts and completions, each padded to the longest of their generation batch."""
        rows, micro_batches, uses = rows_of(plan), micro_batches_of(plan), uses_of(plan)
        copies, multiple = required(plan, "num_generations"), number(plan, "pad_to_multiple_of") or 1
        most, assumed = required(plan, "max_completion_length"), plan.completions
        assert assumed is not None
        generated = rows * steps_per_generation(plan)
        prompts = max(1, generated // copies)
        counts = _prompt_counts(documents)
        widest_prompt = sum(share * rounded_up(width, multiple) for width, share in widest_of(counts, prompts))
        widest_completion = rounded_up(round(assumed.widest), multiple) if multiple > 1 else assumed.widest
        longest = rounded_up(documents.longest, multiple)
        worst = Shape(rows, longest + rounded_up(most, multiple), rounded_up(most, multiple))
        typical = Shape(rows, widest_prompt + widest_completion, widest_completion)
        traced = -(-generated // TRACED_GENERATION)
        of_generation = replace(worst, rows=traced), replace(typical, rows=traced)
        chunked = {OLD_PASS, REFERENCE_PASS}
        return BatchGeometry(
            layout=Layout.PADDED,
            worst=worst,
            typical=typical,
            tokens=rows * (documents.tokens / documents.rows + assumed.mean),
            micro_batches=micro_batches,
            documents=float(rows * micro_batches * plan.launch.processes),
            rows=documents.rows * copies * (uses // steps_per_generation(plan)),
            apart=tuple(
                # The two passes go through the generation batch in chunks of a micro-batch's size.
                PhaseGeometry(name, worst, typical, micro_batches / uses * steps_per_generation(plan))
                if name in chunked
                else PhaseGeometry(name, *of_generation, micro_batches / uses)
                for name in self.program(plan).apart
            ),
        )

    def layout(self, plan: TrainingPlan, rows: int) -> Layout:
        """Completions differ in length."""
        return Layout.PADDED

    def sizes_at(self, layout: Layout, shape: Shape) -> Mapping[str, object]:
        """Return arguments with which completions are as long as in the shape."""
        return {
            "max_completion_length": int(shape.generated),
            "steps_per_generation": TRACED_GENERATION,
            "num_generations": 2,
            "pad_to_multiple_of": None,
        }

    def traced_plan(self, plan: TrainingPlan, layout: Layout, shape: Shape) -> TrainingPlan:
        """Return a plan for a trace, in which old log-probabilities are computed if they are in the plan."""
        traced = super().traced_plan(plan, layout, shape)
        # A step of three micro-batches does not end with a generation batch of two.
        accumulated = TRACED_GENERATION if _aligned(plan) else TRACED_GENERATION + 1
        args = {**traced.args, "gradient_accumulation_steps": accumulated, "num_iterations": 1}
        return replace(traced, args=args, rewards=plan.rewards)

    def traced_rows(self, layout: Layout, shape: Shape, trainable: float) -> tuple[tuple[int, ...], ...]:
        """Return prompts with the tokens of their completions; the adapter makes one of these shorter."""
        generated = int(shape.generated)
        return ((int(shape.tokens) - generated, generated),) * shape.rows

    def phases(self, plan: TrainingPlan) -> StepProgram:
        """Return a program whose generations come before the micro-batches that are trained on them."""
        old = self.compares_with_old(aligned=_aligned(plan))
        return program(
            in_generation=(
                GENERATION,
                *((OLD_PASS,) if old else ()),
                *((REFERENCE_PASS,) if plan.args.get("beta") else ()),
                SCORING,
            )
        )

    def plan(self, candidate: Candidate, setting: Setting) -> TrainingPlan:
        """Return the plan, with the reward functions and what is assumed of completions."""
        plan, workload = super().plan(candidate, setting), setting.workload
        most = required(plan, "max_completion_length")
        generated = rows_of(plan) * steps_per_generation(plan)
        assumed = _completions(workload.rollouts.mean_tokens, workload.dataset.completions, most, generated)
        return replace(plan, rewards=workload.rollouts.rewards or (NO_REWARD,), completions=assumed)

    def rule(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return why a generation batch cannot be made of whole groups of completions of the prompts that there are."""
        plan = self.plan(candidate, setting)
        copies, per_generation = required(plan, "num_generations"), steps_per_generation(plan)
        uses, micro_batches = uses_of(plan), micro_batches_of(plan)
        completions = rows_of(plan) * per_generation * plan.launch.processes
        if completions % copies:
            return (
                f"a generation batch of {completions} completions cannot be divided into groups of the {copies} "
                "completions of one prompt (num_generations)"
            )
        if micro_batches % uses and uses % micro_batches:
            return (
                f"{uses} micro-batches are trained on one generation, which is neither a part nor a multiple of the "
                f"{micro_batches} of an optimizer step"
            )
        prompts, known = completions // copies, setting.workload.dataset.documents.rows
        if prompts > known:
            return f"a generation batch needs {prompts} prompts, and the dataset has {known}"
        return None


def required(plan: TrainingPlan, field: str) -> int:
    """Return an argument that every plan of these trainers sets to a number."""
    return int(str(plan.args[field]))


def steps_per_generation(plan: TrainingPlan) -> int:
    """Return the micro-batches of a generation batch; TRL takes those of an optimizer step if it is told nothing."""
    return number(plan, "steps_per_generation") or micro_batches_of(plan)


def uses_of(plan: TrainingPlan) -> int:
    """Return how many micro-batches are trained on one generation: each of its own, as often as it is iterated over."""
    return steps_per_generation(plan) * (number(plan, "num_iterations") or 1)


def _aligned(plan: TrainingPlan) -> bool:
    """Whether every optimizer step begins with completions of the present model (trl/trainer/grpo_trainer.py)."""
    return micro_batches_of(plan) % uses_of(plan) == 0


def _prompt_counts(documents: Documents) -> dict[int, int]:
    counts: dict[int, int] = {}
    for count, (tokens,) in documents.kept(None):
        counts[tokens] = counts.get(tokens, 0) + count
    return counts


def _completions(asked: int | None, known: LengthDistribution | None, most: int, drawn: int) -> Completions:
    """Return the lengths of typical completions: as the dataset says, as asked for, or half of the maximum.

    Args:
        most: the maximum, to which all are cut.
        drawn: completions of a generation batch.
    """
    if known is None:
        mean = float(min(most, max(1, most // 2 if asked is None else asked)))
        return Completions(mean, mean)
    counts: dict[int, int] = {}
    for tokens, count in known.counts.items():
        counts[min(tokens, most)] = counts.get(min(tokens, most), 0) + count
    cut = LengthDistribution(counts)
    return Completions(cut.tokens / cut.rows, sum(share * tokens for tokens, share in widest_of(counts, drawn)))
