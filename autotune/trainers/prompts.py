"""The base of trainers whose documents are prompts, to which the trained model adds completions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from autotune.core.batch_geometry import Layout, Shape
from autotune.core.documents import Documents
from autotune.core.lengths import LengthDistribution
from autotune.core.plan import Completions, TrainingPlan
from autotune.core.workload import Workload
from autotune.trainers.base import DatasetFormat, Trainer
from autotune.trainers.geometry import widest_of

if TYPE_CHECKING:
    import pyarrow as pa

GENERATION = "generation"
"""The model generates completions."""
REFERENCE_PASS = "reference log-probabilities"
"""The forward pass, without gradients, of the reference: a copy of the model, or the model without its adapters."""
SCORING = "scoring"
"""The reward functions."""

PROMPT, COMPLETION = "prompt_ids", "completion_ids"
"""The columns that tokenising adds: the tokens of prompts, and of the completions that the dataset has."""

NO_REWARD = "get_soft_overlong_punishment"
"""The reward function that is used if none is named: TRL's own, which only looks at a completion's length."""


STAND_IN = "stand-in"
"""The value of ``vllm_mode`` in a trace: the completions are given, as if vLLM had generated them elsewhere."""

GENERATED_SIZES = 2
"""The most sizes that stand for all generations: their time hardly bends with the tokens of prompts, since each token
that is generated reads the keys and values of those before it once."""

# Datasets whose prompts are counted: those to train on, and those to evaluate on.
_REMEMBERED = 4


class Prompted(Trainer):
    """Prompts, with completions that are generated while training.

    Class attributes:
        most_field: the argument that holds the most tokens of a completion.
    """

    formats = (DatasetFormat("prompt", ("prompt",)),)
    parts = ("prompt", "completion")
    generates = True
    scores = True
    stand_in: ClassVar[Mapping[str, object]] = {"prompt": "a b"}
    most_field: ClassVar[str]

    @abstractmethod
    def vllm_tokens(self, plan: TrainingPlan) -> int | None:
        """Return the tokens of the longest sequence that TRL passes to vLLM, or None if it passes none."""

    @abstractmethod
    def padded_together(self, plan: TrainingPlan) -> int:
        """Return how many completions are padded to the longest of them."""

    def row_of(self, tokens: int) -> tuple[tuple[int, ...], int]:
        """Return a prompt of so many tokens."""
        return (tokens, 0), tokens

    def traced_plan(self, plan: TrainingPlan, layout: Layout, shape: Shape) -> TrainingPlan:
        """Return a plan for a trace, with the reward functions if there are any.

        vLLM does not run on a virtual device, and is replaced by completions that are there.
        """
        traced = super().traced_plan(plan, layout, shape)
        args = dict(traced.args)
        if args.get("use_vllm"):
            args.pop("vllm_enable_sleep_mode", None)
            args["vllm_mode"] = STAND_IN
        return replace(traced, args=args, rewards=plan.rewards)

    def traced_rows(self, layout: Layout, shape: Shape, trainable: float) -> tuple[tuple[int, ...], ...]:
        """Return prompts with the tokens of their completions; the adapter makes one of these shorter.

        One of several prompts is shorter, too, where prompts of different lengths are completed together: attention
        then gets a mask, and of 16 prompts of 4,200 tokens that takes 0.8 GiB.
        """
        generated = int(shape.generated)
        # A model generates from a token at least, also where the loss sees none of the prompt.
        prompt = max(1, int(shape.tokens) - generated)
        last = max(1, prompt - 1) if layout is Layout.PADDED and shape.rows > 1 else prompt
        return (*((prompt, generated),) * (shape.rows - 1), (last, generated))

    def layout(self, plan: TrainingPlan, rows: int) -> Layout:
        """Return that of prompts that are completed together, which may differ in length."""
        return Layout.PADDED if rows > 1 else Layout.EQUAL

    def untokenized_rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return all columns of the dataset: tokenising keeps them, since reward functions may read them."""
        return batch.select([name for name in batch.schema.names if name not in (PROMPT, COMPLETION)])

    def completed(self, plan: TrainingPlan, workload: Workload) -> TrainingPlan:
        """Return the plan with the reward functions, if any score, and with what is assumed of completions."""
        most, drawn = required(plan, self.most_field), self.padded_together(plan)
        assumed = _completions(workload.rollouts.mean_tokens, workload.dataset.completions, most, drawn)
        rewards = (workload.rollouts.rewards or (NO_REWARD,)) if self.scores else ()
        return replace(plan, rewards=rewards, completions=assumed)


def required(plan: TrainingPlan, field: str) -> int:
    """Return an argument that every plan of these trainers sets to a number."""
    return int(str(plan.args[field]))


@lru_cache(_REMEMBERED)
def prompt_counts(documents: Documents) -> Mapping[int, int]:
    """Return how many prompts there are of each length in tokens."""
    return documents.by_width()


def _completions(asked: int | None, known: LengthDistribution | None, most: int, drawn: int) -> Completions:
    """Return the lengths of typical completions: the dataset's, those asked for, or half of the maximum.

    Args:
        most: the maximum, to which all are cut.
        drawn: completions that are padded together.
    """
    if known is None:
        mean = float(min(most, max(1, most // 2 if asked is None else asked)))
        return Completions(mean, mean)
    counts: dict[int, int] = {}
    for tokens, count in known.counts.items():
        counts[min(tokens, most)] = counts.get(min(tokens, most), 0) + count
    cut = LengthDistribution(counts)
    return Completions(cut.tokens / cut.rows, sum(share * tokens for tokens, share in widest_of(counts, drawn)))
