"""The files that add a trainer: one specification, one adapter, a search space, and sample rows for its tests."""

from __future__ import annotations

SPECIFICATION = '''
"""A trainer that exists in a test only: two sequences of a row in one padded batch, scored once in a step."""

from autotune.core.rows.batch_geometry import Layout
from autotune.core.program import StepProgram
from autotune.trainers.base import Trainer
from autotune.trainers.declared import DatasetFormat
from autotune.trainers.sft import TRAINER as SFT


class Toy(Trainer):
    """Rows of a question and an answer, each a sequence of its own."""

    label = "Toy"
    title = "Questions and answers"
    config_class = SFT.config_class
    trainer_class = SFT.trainer_class
    formats = (DatasetFormat("question+answer", ("question", "answer")),)
    parts = ("question", "answer")
    stand_in = {"question": "a b", "answer": "b a b"}
    config_fields = SFT.config_fields
    has_command = False

    def document(self, lengths):
        """Return two sequences, each of which can be cut anywhere."""
        return (1, *lengths)

    def traced_rows(self, layout, shape, trainable):
        """Return rows as long as the micro-batch, the last with a shorter question where there is padding."""
        tokens = int(shape.tokens)
        shorter = tokens if layout is Layout.EQUAL else max(1, tokens - 1)
        return (*((tokens, tokens),) * (shape.rows - 1), (shorter, tokens))

    def phases(self, plan):
        """Rows are scored once in a step."""
        return StepProgram(in_step=("score",))

    def rule(self, candidate, setting):
        """Pairs are never packed."""
        if candidate["packing"] != "none" or candidate["padding_free"] != "off":
            return "questions and answers share no row"
        return None


TRAINER = Toy()
'''

ADAPTER = '''
"""A trainer that exists in a test only, made of TRL's SFTTrainer."""

import torch
from datasets import Dataset
from trl import SFTTrainer
from trl.trainer.utils import pad

from autotune.step.rows import RowSizes, column_lengths
from autotune.step.trainers.base import Adapter

COLUMNS = ("question_ids", "answer_ids")
TOKEN = 5


class ToyTrainer(SFTTrainer):
    """Trains on questions and answers as sequences of one padded batch, and scores the first rows of each step."""

    def __init__(self, *args, **kwargs):
        arguments = kwargs["args"]
        super().__init__(*args, data_collator=lambda rows: collate(rows, arguments.pad_to_multiple_of), **kwargs)
        self._calls = 0

    def _prepare_dataset(self, dataset, processing_class, args, *more):
        def tokens(row):
            return {f"{name}_ids": processing_class(row[name])["input_ids"] for name in ("question", "answer")}

        if COLUMNS[0] not in dataset.column_names:
            dataset = dataset.map(tokens)
        return dataset.map(lambda row: {name: row[name][: args.max_length] for name in COLUMNS})

    def _set_signature_columns_if_needed(self):
        self._signature_columns = list(COLUMNS)

    def training_step(self, model, inputs, *args, **kwargs):
        if self._calls % self.args.gradient_accumulation_steps == 0:
            self._scores = self.score(model, inputs)
        self._calls += 1
        return super().training_step(model, inputs, *args, **kwargs)

    def score(self, model, inputs):
        """Return the logits of a micro-batch: more bytes than training takes, which never builds them."""
        known = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad(), self.compute_loss_context_manager():
            return model(**self._prepare_inputs(known), use_cache=False).logits.float()


def collate(rows, multiple):
    """Return the questions, then the answers."""
    sequences = [torch.tensor(row[name]) for name in COLUMNS for row in rows]
    masks = [torch.ones_like(sequence) for sequence in sequences]
    padding = {"padding_side": "right", "pad_to_multiple_of": multiple}
    return {
        "input_ids": pad(sequences, padding_value=0, **padding),
        "labels": pad(sequences, padding_value=-100, **padding),
        "attention_mask": pad(masks, padding_value=0, **padding),
    }


class Toy(Adapter):
    """The child's side."""

    columns = COLUMNS
    methods = {"score": "score"}

    def __init__(self):
        """Train with a class of its own."""
        super().__init__()
        self.trainer = ToyTrainer

    def lengths(self, rows):
        """Return the tokens of questions and answers."""
        return column_lengths(rows, COLUMNS)

    def trainable(self, rows):
        """All tokens count."""
        return self.lengths(rows).sum(axis=1)

    def sizes(self, trainer):
        """Return the sizes of rows as they were cut."""
        return RowSizes(self.lengths(trainer.train_dataset), self.trainable(trainer.train_dataset))

    def rows_and_tokens(self, trainer, batch):
        """Return sequences and tokens."""
        return batch["input_ids"].shape[0], batch["input_ids"].numel()

    def synthetic(self, rows, plan, trainable):
        """Return rows of one repeated token."""
        return Dataset.from_dict(
            {name: [[TOKEN] * row[part] for row in rows] for part, name in enumerate(COLUMNS)}
        )
'''

SEARCH_SPACE = """
trainer: toy
techniques:
  max_length: [coverage, longest]
  gradient_checkpointing: ["on", "off"]
  per_device_train_batch_size: [2, 4, 8]
recipes:
  - {max_length: coverage, gradient_checkpointing: "off"}
"""

SAMPLES = """

def question_answer_rows(texts: Sequence[str]) -> Rows:
    return [{"question": other, "answer": text} for text, other in zip(texts, reversed(texts))]


SAMPLES["toy"] = {"question+answer": question_answer_rows}
REFUSED["toy"] = lambda choices: "packing" in choices or "padding_free" in choices
"""
