"""Builds a trainer's micro-batches from the rows of a dataset: in training, in evaluation and in traces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry, Layout, Recompiled, Shape
from autotune.core.rows.documents import Document, Documents
from autotune.core.rows.heaviest import RowSummary
from autotune.core.rows.images import ImageProfile
from autotune.techniques.attention import FLEX
from autotune.techniques.traits import MAX_TRACED, without_sizes
from autotune.trainers.declared import Declared
from autotune.trainers.geometry import unpacked, widths

if TYPE_CHECKING:
    from autotune.core.rows.table import Numbers

_PROMPT = "prompt"
"""The part of a row that is not in the loss."""
_HALF = 0.5


class MicroBatches(Declared, ABC):
    """The part of a trainer's specification about micro-batches.

    In the order of use: rows are read as documents (:meth:`document`), a plan divides them into micro-batches
    (:meth:`geometry`, from :meth:`micro_batch_geometry`), and a trace runs one of these (:meth:`traced_plan`,
    :meth:`traced_rows`).
    """

    @abstractmethod
    def document(self, lengths: tuple[Any, ...]) -> Document:
        """Return a row as a document: the smallest maximum length that keeps it, and the tokens of its sequences.

        Args:
            lengths: tokens of each of :attr:`parts`, before any cutting: numbers, or arrays over rows.
        """

    def exchanged(self, _documents: Documents) -> Numbers | None:
        """Return the tokens of sequences made of parts of several rows, before any cutting; None: there are none."""
        return None

    @final
    def row_of(self, tokens: int) -> tuple[tuple[int, ...], int]:
        """Return the parts' lengths of a row whose longest sequence has ``tokens`` tokens, and its trainable tokens.

        Half of them are the prompt's, unless the model generates the rest. All parts but the prompt are trainable.
        """
        (parts,) = self.traced_rows(Layout.EQUAL, Shape(1, tokens), _HALF)
        answers = (length for name, length in zip(self.parts, parts, strict=True) if name != _PROMPT)
        return parts, sum(answers) or tokens

    @final
    def geometry(self, plan: TrainingPlan, documents: Documents) -> BatchGeometry:
        """Return the micro-batches and steps of a plan on a dataset."""
        return self.micro_batch_geometry(plan, documents, plan.rows).in_steps(plan.micro_batches, plan.data_ranks)

    def evaluation_geometry(self, plan: TrainingPlan, documents: Documents, rows: int) -> BatchGeometry:
        """Return the micro-batches of ``rows`` rows of a plan's evaluation on a dataset; no gradients accumulate."""
        return self.micro_batch_geometry(plan, documents, rows).in_steps(1, plan.data_ranks)

    def micro_batch_geometry(self, plan: TrainingPlan, documents: Documents, rows: int) -> BatchGeometry:
        """Return the geometry of micro-batches of ``rows`` rows of a dataset, one to a step.

        By default, rows are padded to the longest sequence of their micro-batch, in training and in evaluation.
        """
        return unpacked(documents, rows, plan.number("max_length"), plan.pad_multiple)

    def copies(self, plan: TrainingPlan, *, evaluated: bool = False) -> int:
        """Return the number of micro-batch rows for each row of the dataset, in training or in evaluation."""
        return 1

    def rows_per_draw(self, plan: TrainingPlan) -> int:
        """Return the number of dataset rows that are drawn at once, for one micro-batch or several."""
        return plan.rows

    def rows_per_generation(self, plan: TrainingPlan) -> int:
        """Return the number of dataset rows in a generation batch of all processes; 1 without generation batches."""
        return 1

    @final
    def rows_of_epoch(self, plan: TrainingPlan, rows: int) -> int:
        """Return the number of dataset rows in an epoch: TRL drops an incomplete generation batch."""
        whole = self.rows_per_generation(plan)
        return rows // whole * whole or rows

    def widths(self, plan: TrainingPlan, documents: Documents) -> tuple[Sequence[int], Sequence[int]]:
        """Return the widths that micro-batches can have, and those of micro-batches without padding, ascending."""
        return widths(documents, plan.cut_to, plan.pad_multiple, self.rows_per_draw(plan))

    def without_padding(
        self, plan: TrainingPlan, documents: Documents, geometry: BatchGeometry
    ) -> BatchGeometry | None:
        """Return a plan's geometry with its widest micro-batch without padding as the worst; None if there is none."""
        _, unpadded = self.widths(plan, documents)
        if not unpadded:
            return None
        worst = replace(geometry.worst, tokens=unpadded[-1], filled=1.0)
        return replace(geometry, layout=Layout.EQUAL, worst=worst, rivals=())

    def padded_together(self, plan: TrainingPlan) -> int:
        """Return the number of completions that are padded together; 0 for a trainer that generates none."""
        return 0

    @final
    def compiled_again(self, plan: TrainingPlan, layout: Layout, documents: Documents) -> Recompiled:
        """Return the largest micro-batches for which FlexAttention may be recompiled after the worst one.

        transformers compiles it statically for the first micro-batch, and at a second width for all widths
        (``torch.compile`` without ``dynamic``). Rows come in random order, so the first may be the worst micro-batch,
        and the second the widest of the narrower ones. Micro-batches without padding have no padding mask, for which
        attention is compiled separately. A last micro-batch with fewer rows, once per epoch, is ignored.

        Args:
            layout: layout of the worst micro-batch.
        """
        if plan.model.get("attn_implementation") != FLEX:
            return Recompiled()
        widths, without_padding = self.widths(plan, documents)
        if layout is Layout.FLAT:
            return Recompiled(float(len(widths) > 1))
        narrower, unpadded = widths[-2:-1], without_padding[-1:]
        return Recompiled(
            narrower=sum(narrower) / widths[-1],
            unpadded=sum(unpadded) / widths[-1] if layout in (Layout.PADDED, Layout.COMPLETED) else 0.0,
            generated=self.padded_together(plan),
        )

    def row_summary(self, plan: TrainingPlan, images: ImageProfile, rows: int) -> RowSummary:
        """Return the sizes of rows with images, on which the memory of a micro-batch of ``rows`` rows depends."""
        return images.row_summary.cut_to(plan.number("max_length"))

    def layout(self, plan: TrainingPlan, rows: int) -> Layout:
        """Return the layout of a micro-batch of ``rows`` rows that may differ in length.

        By default, it is padded: the sequences of a single row, such as two answers, may differ too.
        """
        return Layout.PADDED

    def sizes_at(self, layout: Layout, shape: Shape) -> Mapping[str, object]:
        """Return the arguments with which the trainer builds micro-batches of a shape from :meth:`traced_rows`.

        They replace all arguments of techniques that set sizes. By default, nothing is cut or dropped. A single row is
        only padded if its length is rounded up.
        """
        alone = layout is Layout.PADDED and shape.rows == 1 and not shape.generated
        multiple = int(shape.tokens) if alone else None
        sizes = {"max_length": int(max(shape.tokens, shape.second_tokens)), "pad_to_multiple_of": multiple}
        return {name: value for name, value in sizes.items() if name in self.fields}

    @abstractmethod
    def traced_rows(self, layout: Layout, shape: Shape, trainable: float) -> tuple[tuple[int, ...], ...]:
        """Return the rows, as tokens of their parts, of a micro-batch of a shape.

        Args:
            trainable: share of the dataset's tokens that the loss counts.
        """

    def traced_plan(self, plan: TrainingPlan, layout: Layout, shape: Shape) -> TrainingPlan:
        """Return a plan for a trace at a shape, which replaces the plan's own sizes.

        Dataset rows with images are collated as in the plan, and a step has as many as in the plan: the images of all
        its micro-batches are on the device together.
        """
        args, model = without_sizes(plan)
        at = self.sizes_at(layout, shape)
        # A step of one micro-batch is traced as such: it leaves other free blocks in the allocator's cache than two.
        of_step = min(MAX_TRACED, plan.micro_batches)
        if shape.chosen:
            of_step = -(-plan.rows * plan.micro_batches // shape.rows)
        sizes = {
            "per_device_train_batch_size": shape.rows,
            "per_device_eval_batch_size": shape.rows,
            "gradient_accumulation_steps": of_step,
            **({name: plan.args[name] for name in at if name in plan.args} if shape.chosen else at),
        }
        return TrainingPlan(plan.trainer, {**args, **sizes}, model, launch=plan.launch, peft=plan.peft)
