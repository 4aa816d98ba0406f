"""``KTOTrainer``: answers labelled as desirable or not. Micro-batches are blocks of successive rows of the dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.core.candidate import Candidate
from autotune.core.plan import TrainingPlan
from autotune.core.program import PRECOMPUTE, StepProgram
from autotune.core.rows.batch_geometry import BatchGeometry, Layout, Shape
from autotune.core.rows.blocks import blocks_of
from autotune.core.rows.documents import Document, Documents
from autotune.core.rows.heaviest import RowSummary, heaviest, heaviest_blocks
from autotune.core.rows.images import ImageProfile
from autotune.core.rows.representatives import representatives
from autotune.core.setting import Setting
from autotune.core.workload import Workload
from autotune.techniques.per_device_train_batch_size import ROWS
from autotune.trainers.base import Trainer
from autotune.trainers.declared import ConfigFields, DatasetFormat
from autotune.trainers.dpo import REFERENCE_PASS, REFERENCE_PASS_NOTE
from autotune.trainers.geometry import share_of

if TYPE_CHECKING:
    from autotune.core.rows.table import Numbers

POLICY_KL = "policy KL pass"
"""The forward pass of the trained model on mismatched prompts and answers, before its pass with gradients."""
REFERENCE_KL = "reference KL pass"
"""The same pass of the reference, after it."""
WITHOUT_KL = frozenset({"apo_zero_unpaired"})
"""Losses that do not estimate the KL divergence (``KTOTrainer.calculate_KL``)."""

_EXCHANGED = "KTO exchanges answers within a micro-batch to estimate a KL divergence, which depends on its rows"
_CACHED = 4096
# KTOTrainer.__init__ refuses fewer: a row's mismatched answer would be its own.
FEWEST_ROWS = 2
# Tokens of the shortest row that can be traced as a block with padding: prompts and answers of at least a token.
_FEWEST_TOKENS = 4


def estimates_kl(loss_type: object) -> bool:
    """Return whether a loss estimates the KL divergence; None stands for TRL's default, ``kto``."""
    return loss_type not in WITHOUT_KL


class UnpairedPreference(Trainer):
    """Prompts with one answer each and a label; a frozen reference computes the log-probabilities.

    The KL divergence is estimated on mismatched pairs: TRL gives each prompt the answer of the row before it in its
    micro-batch, so that the length of the second tensor depends on the batch size and on the order of the rows.
    """

    label = "KTO"
    title = "Kahneman-Tversky optimisation"
    # TRL converts pairs to rows: the chosen answers of up to 1,000 rows, then their rejected ones.
    formats = (
        DatasetFormat("prompt+chosen+rejected", ("prompt", "chosen", "rejected"), documents=2),
        DatasetFormat("chosen+rejected", ("chosen", "rejected"), documents=2, splits=True),
        DatasetFormat("prompt+completion+label", ("prompt", "completion", "label"), flags=("label",), with_images=True),
    )
    text_peculiarities = (REFERENCE_PASS_NOTE,)
    takes_images = True
    parts = ("prompt", "completion")
    config_fields = ConfigFields(
        traced=frozenset({
            "beta", "desirable_weight", "disable_dropout", "loss_type", "precompute_ref_batch_size",
            "router_aux_loss_coef", "sync_ref_model", "undesirable_weight",
        }),
        without_effect=frozenset({
            "model_init_kwargs", "ref_model_mixup_alpha", "ref_model_sync_steps", "trust_remote_code",
        }),
        assumed={
            "dataset_num_proc": "rows made of pairs, and mismatched pairs, are those of one process, whatever"
            " dataset_num_proc is",
        },
        others=frozenset({"activation_offloading", "max_length", "pad_to_multiple_of", "precompute_ref_log_probs"}),
    )  # fmt: skip
    stand_in: ClassVar[Mapping[str, object]] = {"prompt": "a b", "completion": " a b", "label": True}
    ordered = True
    fewest_rows = FEWEST_ROWS

    def document(self, lengths: tuple[Any, ...]) -> Document:
        """Return the sequence; TRL drops a row whose prompt alone fills the maximum length."""
        prompt, completion = lengths
        return (prompt + 1, prompt + completion)

    def micro_batch_geometry(self, plan: TrainingPlan, documents: Documents, rows: int) -> BatchGeometry:
        """Return blocks of successive rows, each padded to its longest sequence.

        A last block with fewer rows counts as if its rows were repeated, unless another block is at least as large.
        Blocks with and without padding are treated as padded if one of the worst has padding. In evaluation, TRL
        exchanges answers within blocks of as many rows as in training; for rows with images, the collator exchanges
        them within the evaluation blocks (:meth:`row_summary`).
        """
        return _plan_blocks(plan, documents, rows)[0]

    def widths(self, plan: TrainingPlan, documents: Documents) -> tuple[Sequence[int], Sequence[int]]:
        """Return the widths of an epoch's blocks: rows keep their order, and each micro-batch is a block."""
        return _plan_blocks(plan, documents, plan.rows)[1:]

    def row_summary(self, plan: TrainingPlan, images: ImageProfile, rows: int) -> RowSummary:
        """Return the sizes with mismatched pairs: for rows with images, the collator exchanges the answers."""
        found, own = super().row_summary(plan, images, rows), images.row_summary
        if not estimates_kl(plan.args.get("loss_type")):
            return found
        prompts = own.widest - own.trainable
        return replace(found, second_tokens=mismatched(prompts, own.trainable, rows, plan.number("max_length")))

    def exchanged(self, documents: Documents) -> Numbers:
        """Return the tokens of mismatched pairs, as if the dataset were one block.

        Losses without a KL divergence have no such pairs.
        """
        whole = documents.in_order(None)
        prompts = whole[:, 0] - 1
        return mismatched(prompts, whole[:, 1] - prompts, len(whole), None)

    def layout(self, plan: TrainingPlan, rows: int) -> Layout:
        """Rows differ in length, so several rows are padded."""
        return Layout.PADDED if rows > 1 else Layout.EQUAL

    def own_loss(self, args: Mapping[str, object]) -> Mapping[str, str]:
        """Return the dependence on a micro-batch's rows: the estimate of the KL divergence, if the loss has one."""
        return {ROWS: _EXCHANGED} if estimates_kl(args.get("loss_type")) else {}

    def traced_rows(self, layout: Layout, shape: Shape, trainable: float) -> tuple[tuple[int, ...], ...]:
        """Return a block whose rows and mismatched pairs are as wide as in the shape.

        The widest mismatched pair is the first prompt with the last answer; if it is narrower than the rows, the first
        row is the widest row. If rows are padded, one is a token shorter.
        """
        tokens = int(shape.tokens)
        if shape.rows == 1 or tokens < _FEWEST_TOKENS:
            tokens -= shape.rows == 1 and tokens > 1 and layout is Layout.PADDED
            answer = min(max(1, tokens - 1), max(1, round(tokens * trainable)))
            return ((tokens - answer, answer),) * shape.rows
        # The possible widths of mismatched pairs of rows with a prompt and an answer of at least a token each.
        second_tokens = _clamp(int(shape.second_tokens) or tokens, (tokens + 3) // 2, 2 * tokens - 2)
        apart = abs(second_tokens - tokens)
        # The mean answer has the trainable tokens, and no prompt or answer is empty.
        answers = tokens * trainable - (tokens - second_tokens) / shape.rows
        prompt = _clamp(second_tokens - round(answers), apart + 1, min(tokens, second_tokens) - 1)
        first, others = (prompt, tokens - prompt), (prompt - apart, second_tokens - prompt)
        last = (others[0] - 1, others[1]) if layout is Layout.PADDED else others
        return (first, *(others,) * (shape.rows - 2), last)

    def phases(self, plan: TrainingPlan) -> StepProgram:
        """Return a program with the KL passes, and the reference's over the dataset beforehand or in micro-batches."""
        policy = (POLICY_KL,) if estimates_kl(plan.args.get("loss_type")) else ()
        if plan.args.get("precompute_ref_log_probs"):
            return StepProgram(before=(PRECOMPUTE,), in_micro_batch=policy)
        reference = (REFERENCE_KL, REFERENCE_PASS) if policy else (REFERENCE_PASS,)
        return StepProgram(in_micro_batch=(*policy, *reference))

    def rule(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return the reason of :meth:`refused`; no plan is built for candidates with enough rows."""
        few = int(candidate[ROWS]) < FEWEST_ROWS
        reason = self.refused(self.plan(candidate, setting), setting.workload) if few else None
        if reason is None or setting.documents_per_process >= FEWEST_ROWS:
            return reason
        ranks = setting.global_batch_size // setting.documents_per_process
        return f"{reason} (--global-batch-size {ranks * FEWEST_ROWS})"

    def refused(self, plan: TrainingPlan, workload: Workload) -> str | None:
        """Return a reason if the loss estimates the KL divergence on a single row."""
        if plan.rows >= FEWEST_ROWS or not estimates_kl(plan.args.get("loss_type")):
            return None
        return (
            "KTO estimates a KL divergence on answers that it exchanges within a micro-batch, so "
            f"per_device_train_batch_size has to be at least {FEWEST_ROWS}"
        )


TRAINER = UnpairedPreference()


_Epoch = tuple[BatchGeometry, Sequence[int], Sequence[int]]
"""The geometry of an epoch's blocks, one to a step; the widths of whole blocks; and of those without padding."""


def _plan_blocks(plan: TrainingPlan, documents: Documents, rows: int) -> _Epoch:
    exchanged = plan.rows if estimates_kl(plan.args.get("loss_type")) else None
    length, multiple = plan.number("max_length"), plan.pad_multiple
    return _blocks(documents, rows, length, multiple, exchanged)


@lru_cache(_CACHED)
def _blocks(documents: Documents, rows: int, length: int | None, multiple: int, exchanged: int | None) -> _Epoch:
    """Return the blocks of an epoch; if a length keeps no row, all rows are cut.

    Args:
        exchanged: rows among which answers are exchanged; None without a KL divergence.
    """
    import numpy as np

    dropping = length is None or documents.first_kept <= length
    kept, counted = documents.in_order(length, dropping=dropping), documents.trained_in_order(length, dropping=dropping)
    if documents.order is None:
        drawn = np.random.default_rng(0).permutation(len(kept))
        kept, counted = kept[drawn], None if counted is None else counted[drawn]
    # A document's first number is the length of its prompt + 1.
    prompts = kept[:, 0] - 1
    own, answers = kept[:, 1] if length is None else kept[:, 1].clip(max=length), kept[:, 1] - prompts
    # Rows are cut at the end of their answers.
    trained = own - prompts if counted is None else np.minimum(counted, own - prompts)
    second_tokens = None if exchanged is None else mismatched(prompts, answers, exchanged, length)
    found = blocks_of(own, second_tokens, rows, multiple)
    whole = found["rows"] == rows if len(own) >= rows else found["rows"] > 0
    widths, second_widths = found["tokens"][whole], found["second_tokens"][whole]
    held = np.add.reduceat(own, np.arange(0, len(own), rows))[whole]
    unpadded = np.unique(widths[~found["padded"][whole]]).tolist()
    in_epoch, every_token = len(own), int(own.sum())
    if documents.order is None:
        # Any rows may share a block. A single row is evaluated with the answer of any other.
        most = answers.max()
        some = np.concatenate(_largest_of_any(prompts, answers, RowSummary(own, own, trained), rows, multiple))
        prompts, answers, own, trained = (each[some] for each in (prompts, answers, own, trained))
        if exchanged is not None:
            second_tokens = mismatched(prompts, np.full_like(answers, most) if rows == 1 else answers, rows, length)
        found = blocks_of(own, second_tokens, rows, multiple)
    starts = np.arange(0, len(own), rows)
    in_block, counted_in_block = np.add.reduceat(own, starts), np.add.reduceat(trained, starts)
    summary = RowSummary(own, own, trained, second_tokens=second_tokens)
    worst = [int(chosen[0]) // rows for chosen in heaviest_blocks(summary, rows, multiple)]
    shapes: dict[tuple[int, int], Shape] = {}
    for place in worst:
        width, second, tokens = (int(numbers[place]) for numbers in (found["tokens"], found["second_tokens"], in_block))
        filled, share = share_of(tokens, rows * width), float(counted_in_block[place]) / tokens
        shape = Shape(rows, width, second_tokens=second, filled=filled, trained=share)
        known = shapes.get((width, second), shape)
        # Of blocks with the same widths, the one with the most tokens in the loss is traced.
        shapes[width, second] = max(known, shape, key=lambda shape: shape.filled * shape.trained)

    def shape_of(tokens: int, second_tokens: float, held: float) -> Shape:
        return Shape(rows, tokens, second_tokens=round(second_tokens), filled=min(1.0, held / (rows * tokens)))

    largest, *rivals = shapes.values()
    geometry = BatchGeometry(
        layout=Layout.PADDED if (found["padded"] | found["second_padded"])[worst].any() else Layout.EQUAL,
        worst=largest,
        rivals=tuple(rivals),
        sizes=representatives(widths, shape_of, figures=[second_widths, held]),
        tokens=rows * every_token / in_epoch,
        documents=float(rows),
        rows=in_epoch,
    )
    return geometry, np.unique(widths).tolist(), unpadded


def _largest_of_any(prompts: Numbers, answers: Numbers, summary: RowSummary, rows: int, multiple: int) -> list[Numbers]:
    """Return the largest blocks of rows in any order; the last one has the widest mismatched pair.

    That is the longest prompt with the longest answer of another row.

    Args:
        prompts, answers: tokens of each row before cutting.
    """
    import numpy as np

    # Of a row that has both, the second longest of one of them makes the pair.
    first, second = ((-each).argsort(kind="stable")[:2] for each in (prompts, answers))
    pairs = [(prompts[one] + answers[other], other, one) for one in first for other in second if one != other]
    _, *pair = max(pairs, default=(0, first[0]))
    widest = [row for row in np.lexsort((-summary.trainable, -summary.widest)) if row not in pair]
    found = heaviest(summary, rows, padded=True, multiple=multiple)
    return [*found, np.resize([*pair, *widest][:rows], rows)]


def mismatched(prompts: Numbers, answers: Numbers, rows: int, length: int | None) -> Numbers:
    """Return the tokens of each prompt with the answer of the row before it; the first of a block has the last one's.

    Args:
        prompts, answers: tokens of each row; shape (rows,).
        rows: rows of a block, within which answers are exchanged.
        length: tokens to which pairs are cut, or None.
    """
    import numpy as np

    before = np.arange(-1, len(prompts) - 1)
    before[::rows] = np.minimum(before[::rows] + rows, len(prompts) - 1)
    pairs: Numbers = prompts + answers[before]
    return pairs if length is None else pairs.clip(max=length)


def _clamp(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))
