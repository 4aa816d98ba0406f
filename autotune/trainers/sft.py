"""``SFTTrainer``: supervised fine-tuning. A document is one sequence, which can be cut anywhere, packed, or padded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry, Layout, Shape
from autotune.core.rows.documents import Document, Documents
from autotune.core.workload import CHAT_TEMPLATE, IGNORED_LABEL, UNUSED_COLUMNS, ModelProfile
from autotune.techniques.max_length import TRUNCATION, MaxLength
from autotune.techniques.packing import CUTTING, SEPARATING
from autotune.techniques.packing import NAME as PACKING
from autotune.techniques.pad_to_multiple_of import NAME as PAD_TO_MULTIPLE_OF
from autotune.techniques.padding_free import DOCUMENT_LENGTHS, PaddingFree
from autotune.techniques.per_device_train_batch_size import ROWS
from autotune.techniques.traits import AVERAGE_TOKENS
from autotune.trainers.base import Trainer
from autotune.trainers.declared import ConfigFields, DatasetFormat
from autotune.trainers.geometry import packed, unpacked

if TYPE_CHECKING:
    import pyarrow as pa

_TRACED_DOCUMENTS = 4
"""Number of documents in a traced packed row, if it has a token for each."""


class SupervisedFineTuning(Trainer):
    """Rows of tokens, all or some of which the loss counts."""

    label = "SFT"
    title = "Supervised fine-tuning"
    # In the order in which SFTTrainer looks for them.
    formats = (
        DatasetFormat("input_ids", ("input_ids",), tokenized=True),
        DatasetFormat("prompt+completion", ("prompt", "completion"), with_images=True),
        DatasetFormat("conversations", ("conversations",), text=False),
        DatasetFormat("messages", ("messages",), text=False, with_images=True),
        DatasetFormat("text", ("text",), named_by="dataset_text_field"),
    )
    # The columns of Alpaca's format.
    advice: ClassVar[Mapping[tuple[str, ...], str]] = {
        ("instruction", "output"): "Rename `instruction` to `prompt` and `output` to `completion`; join `input`, if "
        "there is one, to the prompt.",
        # TRL ignores this column if its messages have role and content (``is_conversational_from_value``).
        ("conversations",): "Rename `conversations` to `messages` where its messages have role and content: TRL reads "
        "`conversations` with from and value.",
    }
    of_tokens = ("labels",)
    masks = ("completion_mask", "assistant_masks")
    optional_columns = (DOCUMENT_LENGTHS,)
    further_columns = (*Trainer.further_columns, *of_tokens, *masks)
    takes_images = True
    parts = ("tokens",)
    config_fields = ConfigFields(
        traced=frozenset({"eval_packing", "loss_type", "router_aux_loss_coef", TRUNCATION}),
        without_effect=frozenset({
            "chat_template_path", "dataset_kwargs", "dataset_num_proc", "dataset_text_field", "eos_token",
            "model_init_kwargs", "pad_token", "trust_remote_code",
        }),
        assumed={
            "assistant_only_loss": "the loss counts every token, including those that assistant_only_loss excludes",
            "completion_only_loss": "the loss counts every token, including those that completion_only_loss excludes",
        },
        reading=frozenset({
            "assistant_only_loss", CHAT_TEMPLATE, "completion_only_loss", "dataset_kwargs", "dataset_text_field",
            "eos_token", "pad_token", TRUNCATION, UNUSED_COLUMNS,
        }),
        others=frozenset({
            "activation_offloading", "max_length", "packing", "packing_strategy", "pad_to_multiple_of", "padding_free",
            "shuffle_dataset",
        }),
    )  # fmt: skip

    stand_in: ClassVar[Mapping[str, object]] = {"text": "a b"}

    def document(self, lengths: tuple[Any, ...]) -> Document:
        """Return one sequence, which is kept at any maximum length."""
        return (1, *lengths)

    def loss_depends_on(
        self,
        args: Mapping[str, object],
        model: ModelProfile | None = None,
        processes: int = 1,
        columns: Collection[str] = (),
    ) -> Mapping[str, str]:
        """Return the dependences of the loss, including a mean over the tokens of a micro-batch or of a process.

        The length of packed rows determines a micro-batch's documents, as packing does.
        """
        found = dict(super().loss_depends_on(args, model, processes))
        if DOCUMENT_LENGTHS in columns:
            how = f"the documents that {DOCUMENT_LENGTHS} names attend to one another, unless padding_free is on alone"
            found |= dict.fromkeys((PaddingFree.name, PACKING), how)
        if model is not None and not model.accepts_loss_kwargs:
            how = f"{model.architecture} averages its loss over the tokens of each micro-batch, whose number varies"
            found |= dict.fromkeys((ROWS, PACKING), how)
        if processes > 1 and args.get(AVERAGE_TOKENS) is False:
            how = f"{AVERAGE_TOKENS}: false divides the loss of each process by its own number of tokens"
            found |= dict.fromkeys((ROWS, PACKING), how)
        if args.get("packing") and PACKING in found:
            found[MaxLength.name] = found[PACKING]
        if self.balances_experts(args, model):
            # Concatenated rows have no mask; without one, transformers' ``load_balancing_loss_func`` counts all tokens.
            found[PAD_TO_MULTIPLE_OF] = "the load-balancing loss of experts counts the padding of concatenated rows"
        return found

    def micro_batch_geometry(self, plan: TrainingPlan, documents: Documents, rows: int) -> BatchGeometry:
        """Return packed, padding-free or padded rows."""
        return self._geometry_of(plan, documents, rows, packs=plan.args.get("packing"))

    def evaluation_geometry(self, plan: TrainingPlan, documents: Documents, rows: int) -> BatchGeometry:
        """Return evaluation rows, packed if ``eval_packing`` is set, and otherwise collated as in training."""
        own = plan.args.get("eval_packing")
        packs = plan.args.get("packing") if own is None else own
        return self._geometry_of(plan, documents, rows, packs=packs).in_steps(1, plan.data_ranks)

    def _geometry_of(self, plan: TrainingPlan, documents: Documents, rows: int, *, packs: object) -> BatchGeometry:
        flat = self.layout(plan, rows) is Layout.FLAT
        if packs:
            length = plan.cut_to or int(MaxLength.trl_default)
            return packed(documents, rows, length, plan.pad_multiple, _strategy(plan), flat=flat)
        return unpacked(documents, rows, plan.cut_to, plan.pad_multiple, flat=flat)

    def layout(self, plan: TrainingPlan, rows: int) -> Layout:
        """Rows with separate documents are laid end to end; others are padded if there are at least two.

        That includes wrapped rows, since the last row of a dataset is not full.
        """
        if plan.args.get("padding_free") or (plan.args.get("packing") and _strategy(plan) in SEPARATING):
            return Layout.FLAT
        return Layout.PADDED if rows > 1 else Layout.EQUAL

    def sizes_at(self, layout: Layout, shape: Shape) -> Mapping[str, object]:
        """Return arguments that cut nothing, and that pack if rows are laid end to end."""
        flat = layout is Layout.FLAT
        packing = {"packing": True, "packing_strategy": CUTTING} if flat else {"packing": False}
        return {**super().sizes_at(layout, shape), "padding_free": False, **packing}

    def traced_rows(self, layout: Layout, shape: Shape, trainable: float) -> tuple[tuple[int, ...], ...]:
        """Return rows as long as the micro-batch; the adapter masks tokens outside the loss."""
        tokens = int(shape.tokens)
        if layout is Layout.FLAT:
            count = min(_TRACED_DOCUMENTS, tokens)
            return tuple((tokens * (place + 1) // count - tokens * place // count,) for place in range(count))
        # A shorter row adds the mask.
        shorter = max(1, tokens - 1) if layout is Layout.PADDED else tokens
        return (*((tokens,),) * (shape.rows - 1), (shorter,))

    def copied_rows(self, batch: pa.RecordBatch, length: int | None) -> pa.RecordBatch:
        """Return rows cut at the end; rows without a token in the loss are dropped, as in TRL."""
        import pyarrow as pa
        import pyarrow.compute

        # pyarrow's kernels are made at import from C++ and have no type stubs.
        compute: Any = pyarrow.compute
        columns = {name: compute.list_slice(batch.column(name), 0, length) for name in ("input_ids", "labels")}
        labels = columns["labels"]
        counted = compute.not_equal(compute.list_flatten(labels), IGNORED_LABEL)
        trainable = compute.unique(compute.filter(compute.list_parent_indices(labels), counted))
        return pa.RecordBatch.from_pydict({name: column.take(trainable) for name, column in columns.items()})


def _strategy(plan: TrainingPlan) -> str:
    """Return the packing strategy; TRL's default is bfd (SFTConfig.packing_strategy)."""
    return str(plan.args.get("packing_strategy", CUTTING))


TRAINER = SupervisedFineTuning()
