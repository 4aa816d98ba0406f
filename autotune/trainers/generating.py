"""The base of trainers that generate completions for several micro-batches at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from autotune.core.batch_geometry import BatchGeometry, Layout, PhaseGeometry, Shape, Typical, rounded_up
from autotune.core.candidate import Candidate
from autotune.core.documents import Document, Documents
from autotune.core.plan import TrainingPlan
from autotune.core.representatives import MOST, representatives
from autotune.core.setting import Setting
from autotune.core.workload import Workload
from autotune.trainers.geometry import micro_batches_of, number, rows_of, widest_of
from autotune.trainers.prompts import GENERATED_SIZES, GENERATION, Prompted, prompt_counts, required

TRACED_GENERATION = 2
"""Micro-batches of the generation batch in a trace: completions of two prompts divide into micro-batches of one row."""


class Generating(Prompted):
    """Prompts whose completions are generated for one or more micro-batches at once.

    Prompts are never cut. A micro-batch is as wide as the longest prompt and the longest completion of its generation
    batch together, since both are padded apart, before the generation batch is divided into micro-batches.

    Class attributes:
        at_once: phases that a generation batch goes through as a whole.
        in_chunks: those that it goes through in chunks of a micro-batch's size.
    """

    counted = "completions"
    most_field = "max_completion_length"
    at_once: ClassVar[tuple[str, ...]] = (GENERATION,)
    in_chunks: ClassVar[tuple[str, ...]] = ()

    def vllm_tokens(self, plan: TrainingPlan) -> int | None:
        """Return the plan's value."""
        return number(plan, "vllm_max_model_length")

    def document(self, lengths: tuple[Any, ...]) -> Document:
        """Return the prompt, which is kept at any length."""
        return (1, lengths[0])

    def geometry(self, plan: TrainingPlan, documents: Documents) -> BatchGeometry:
        """Return the geometry of prompts and completions, each padded to the longest of their generation batch."""
        rows, micro_batches, uses = rows_of(plan), micro_batches_of(plan), uses_of(plan)
        copies, multiple = self.copies(plan), number(plan, "pad_to_multiple_of") or 1
        most, assumed = required(plan, self.most_field), plan.completions
        assert assumed is not None
        generated = self.padded_together(plan)
        prompts = self.drawn(plan)
        counts = prompt_counts(documents)
        widest_completion = rounded_up(round(assumed.widest), multiple)
        widest = widest_of(counts, prompts)
        widths = [rounded_up(width, multiple) + widest_completion for width, _ in widest]
        shares = [share for _, share in widest]
        longest = rounded_up(documents.longest, multiple)
        worst = Shape(rows, longest + rounded_up(most, multiple), rounded_up(most, multiple))
        traced = -(-generated // TRACED_GENERATION)

        def sizes(rows: int, most: int = MOST) -> tuple[Typical, ...]:
            found = representatives(widths, shares, most=most)
            return tuple(Typical(Shape(rows, each.tokens, widest_completion), each.share) for each in found)

        # Those that a plan has not are no part of its traces. Sizes alone decide the geometry.
        chunked = [
            PhaseGeometry(name, worst, sizes(rows), micro_batches / uses * steps_per_generation(plan))
            for name in self.in_chunks
        ]
        whole = [
            PhaseGeometry(name, replace(worst, rows=traced), sizes(traced, GENERATED_SIZES), micro_batches / uses)
            for name in self.at_once
        ]
        return BatchGeometry(
            layout=self.layout(plan, rows) if len(counts) > 1 else Layout.EQUAL,
            worst=worst,
            sizes=sizes(rows),
            tokens=rows * (documents.tokens / documents.rows + assumed.mean),
            micro_batches=micro_batches,
            documents=float(rows * micro_batches * plan.data_ranks),
            ranks=plan.data_ranks,
            rows=documents.rows * copies * (uses // steps_per_generation(plan)),
            apart=(*whole, *chunked),
        )

    def layout(self, plan: TrainingPlan, rows: int) -> Layout:
        """Return that of the prompts of a generation batch."""
        return super().layout(plan, rows * steps_per_generation(plan) // self.copies(plan))

    def drawn(self, plan: TrainingPlan) -> int:
        """Return the prompts of a generation batch."""
        return max(1, self.padded_together(plan) // self.copies(plan))

    def evaluated(self, plan: TrainingPlan, documents: Documents, rows: int) -> BatchGeometry:
        """Return the geometry of evaluation, in which each micro-batch has a generation of its own."""
        return replace(super().evaluated(plan, documents, rows), apart=())

    def sizes_at(self, layout: Layout, shape: Shape) -> Mapping[str, object]:
        """Return arguments with which completions are as long as in the shape."""
        return {"max_completion_length": int(shape.generated), "pad_to_multiple_of": None}

    def traced_plan(self, plan: TrainingPlan, layout: Layout, shape: Shape) -> TrainingPlan:
        """Return a plan for a trace, in which one generation is for all micro-batches of a step."""
        traced, at = super().traced_plan(plan, layout, shape), dict(self.sizes_at(layout, shape))
        if shape.chosen:
            # Rows of the dataset are padded as the plan pads them.
            at.pop("pad_to_multiple_of")
        return replace(traced, args={**traced.args, **at, "gradient_accumulation_steps": TRACED_GENERATION})

    def padded_together(self, plan: TrainingPlan) -> int:
        """Return the completions of a generation batch."""
        return rows_of(plan) * steps_per_generation(plan)

    def rule(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return why TRL cannot train by the plan of a candidate."""
        return self.refused(self.plan(candidate, setting), setting.workload)

    def refused(self, plan: TrainingPlan, workload: Workload) -> str | None:
        """Return a reason where the dataset has fewer prompts than a generation batch, of which TRL drops the rest."""
        completions = rows_of(plan) * steps_per_generation(plan) * plan.data_ranks
        prompts, known = completions // self.copies(plan), workload.dataset.documents.rows
        if prompts > known:
            return f"a generation batch needs {prompts} prompts, and the dataset has {known}"
        return None


def steps_per_generation(plan: TrainingPlan) -> int:
    """Return the micro-batches of a generation batch; TRL's default is those of an optimizer step."""
    return number(plan, "steps_per_generation") or micro_batches_of(plan)


def uses_of(plan: TrainingPlan) -> int:
    """Return how many micro-batches are trained on one generation: each of its own, as often as it is iterated over."""
    return steps_per_generation(plan) * (number(plan, "num_iterations") or 1)
