"""The base of trainers that generate completions of prompts: GRPO, RLOO, online DPO, distillation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.core.plan import Completions, TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry, Layout, PhaseGeometry, Shape, Typical, rounded_up
from autotune.core.rows.documents import Document, Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.rows.representatives import MAX_REPRESENTATIVES, representatives
from autotune.core.workload import Workload
from autotune.errors import InputError
from autotune.techniques.vllm import COLOCATE, SERVER
from autotune.trainers.base import Trainer
from autotune.trainers.declared import ConfigFields, DatasetFormat
from autotune.trainers.geometry import widest_of

if TYPE_CHECKING:
    import pyarrow as pa

GENERATION = "generation"
"""The model generates completions."""
SYNCHRONISATION = "weights for vLLM"
"""The part of a generation in which vLLM receives the trained weights."""
REFERENCE_PASS = "reference log-probabilities"
"""The forward pass, without gradients, of the reference: a copy of the model, or the model without its adapters."""
SCORING = "scoring"
"""The reward functions."""

PROMPT, COMPLETION = "prompt_ids", "completion_ids"
"""The columns that tokenising adds: the tokens of prompts, and of the dataset's typical completions."""

NO_REWARD = "get_soft_overlong_punishment"
"""The default reward function: TRL's own, which depends only on a completion's length."""
PLACEHOLDER = (
    f"The configuration has a placeholder reward, {NO_REWARD}, which rates the length of completions alone: replace"
    " reward_funcs before training"
)
PLACEHOLDER_REWARD = f"{PLACEHOLDER}, or name yours with --reward-funcs."
"""The note on a configuration for which the user named no reward function."""
TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", NO_REWARD)
"""The reward functions that TRL's scripts take by name (trl/scripts/grpo.py)."""
REWARD_HINT = f"Give a dotted path from here, such as my_rewards.length, or one of {', '.join(TRL_REWARDS)}."


_MODE = "vllm_mode"
STAND_IN_SERVER = "stand-in"
"""The value of ``vllm_mode`` in a trace, in which a stand-in for a vLLM server returns completions."""

GENERATED_SIZES = 2
"""Maximum number of sizes that represent all generations: their time is almost linear in the tokens of prompts, since
each generated token reads the keys and values of all earlier tokens once."""

CONFIG_FIELDS = ConfigFields(
    traced=frozenset({
        "disable_dropout", "generation_kwargs", "min_p", "repetition_penalty", "temperature", "top_k", "top_p",
    }),
    without_effect=frozenset({
        "model_init_kwargs", "trust_remote_code", "vllm_group_port", "vllm_server_base_url", "vllm_server_host",
        "vllm_server_port", "vllm_server_timeout",
    }),
    others=frozenset({
        "cache_implementation", "ds3_gather_for_generation", "use_vllm", "vllm_enable_sleep_mode",
        "vllm_gpu_memory_utilization", "vllm_mode", "vllm_model_impl", "vllm_structured_outputs_regex",
        "vllm_tensor_parallel_size",
    }),
)  # fmt: skip
"""The fields that the configurations of these trainers share."""


class Prompted(Trainer):
    """Prompts, with completions that are generated while training.

    Class attributes:
        max_completion_field: the argument for the maximum number of tokens of a completion.
        completions_per_row: completions of a row in a micro-batch.
        sends_text: whether TRL sends prompts to a vLLM server as text, not as tokens.
        at_once: phases that run on a whole generation batch.
        in_chunks: phases that run on chunks of it, of a micro-batch's size.
    """

    formats = (DatasetFormat("prompt", ("prompt",)),)
    parts = ("prompt", "completion")
    generates = True
    scores = True
    stand_in: ClassVar[Mapping[str, object]] = {"prompt": "a b"}
    max_completion_field: ClassVar[str]
    completions_per_row: ClassVar[int] = 1
    sends_text: ClassVar[bool] = False
    at_once: ClassVar[tuple[str, ...]] = (GENERATION,)
    in_chunks: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def vllm_tokens(self, plan: TrainingPlan) -> int | None:
        """Return the maximum model length that TRL passes to vLLM, in tokens, or None if it passes none."""

    @abstractmethod
    def padded_together(self, plan: TrainingPlan) -> int:
        """Return the number of completions that are padded together."""

    def document(self, lengths: tuple[Any, ...]) -> Document:
        """Return the prompt, which is kept at any length."""
        return (1, lengths[0])

    def rows_generating_whole(self, plan: TrainingPlan) -> int:
        """Return the rows of a micro-batch whose trace generates as many completions as the plan does at once."""
        return plan.rows

    def scored(self, plan: TrainingPlan, prompt: int, completion: int) -> int:
        """Return the tokens of a row in the loss's forward pass, given the tokens of its prompt and completion."""
        return prompt + completion

    def micro_batch_geometry(self, plan: TrainingPlan, documents: Documents, rows: int) -> BatchGeometry:
        """Return prompts and completions, each padded to the longest of their generation batch."""
        steps, iterations = plan.steps_per_generation, plan.number("num_iterations") or 1
        # Within a step, generations lead micro-batches, and are counted for each of these.
        led = 1 if plan.generates_within_steps else plan.micro_batches
        generations = led / plan.micro_batches_per_generation
        multiple, assumed = plan.pad_multiple, plan.completions
        assert assumed is not None
        most = rounded_up(plan.count(self.max_completion_field), multiple)
        completion = rounded_up(round(assumed.widest), multiple)
        longest, counts = rounded_up(documents.longest, multiple), documents.widths
        widths, shares = zip(*widest_of(counts, self.rows_per_draw(plan)), strict=True)
        prompts = [rounded_up(width, multiple) for width in widths]
        whole = [prompt + completion for prompt in prompts]
        traced = self.rows_generating_whole(plan)

        def sizes(rows: int, widths: Sequence[int], most: int = MAX_REPRESENTATIVES) -> tuple[Typical, ...]:
            return representatives(widths, lambda tokens: Shape(rows, tokens, completion), shares, most=most)

        worst = Shape(rows, self.scored(plan, longest, most), most)
        typical = sizes(rows, [self.scored(plan, prompt, completion) for prompt in prompts])
        generated = Shape(traced, longest + most, most), sizes(traced, whole, GENERATED_SIZES), generations

        chunk, layout = (worst, typical, generations * steps), self.layout(plan, rows)
        if layout is not Layout.EQUAL:
            differ = layout is Layout.PADDED and len(counts) > 1
            layout = Layout.PADDED if differ or longest > documents.longest else Layout.COMPLETED
        return BatchGeometry(
            layout=layout,
            worst=worst,
            sizes=typical,
            tokens=rows * self.completions_per_row * (documents.tokens / documents.rows + assumed.mean),
            documents=float(rows),
            rows=self.rows_of_epoch(plan, documents.rows) * self.copies(plan) * iterations,
            sequences=self.completions_per_row,
            phases=(
                *(PhaseGeometry(name, *generated) for name in self.at_once),
                *(PhaseGeometry(name, *chunk) for name in self.in_chunks),
            ),
        )

    def without_padding(
        self, plan: TrainingPlan, documents: Documents, geometry: BatchGeometry
    ) -> BatchGeometry | None:
        """Return the geometry of completions of equally long prompts, the longest of which there are enough.

        Completions are all as long as they may be. A micro-batch of a single row has no padding either if its prompt
        and its completion are the longest of a generation batch, whose other prompts may be shorter.
        """
        together = self.rows_per_draw(plan)
        found = self._unpadded(plan, documents, 1 if plan.rows == 1 else together)
        if found is None:
            return None
        generated = self._unpadded(plan, documents, together) or geometry
        at_once = (replace(each, layout=generated.layout) for each in generated.phases if each.phase in self.at_once)
        others = (each for each in found.phases if each.phase not in self.at_once)
        return replace(geometry, layout=found.layout, worst=found.worst, rivals=(), phases=(*at_once, *others))

    def _unpadded(self, plan: TrainingPlan, documents: Documents, together: int) -> BatchGeometry | None:
        """Return the geometry of the longest prompts of which ``together`` are equally long; None if there are none."""
        known = documents.widths.items()
        enough = (width for width, rows in known if rows >= together and width % plan.pad_multiple == 0)
        widest = max(enough, default=None)
        if widest is None:
            return None
        equal = Documents.of_groups([(documents.widths[widest], 1, widest)])
        return replace(self.micro_batch_geometry(plan, equal, plan.rows), layout=Layout.EQUAL)

    def sizes_at(self, layout: Layout, shape: Shape) -> Mapping[str, object]:
        """Return arguments with which completions are as long as in the shape, and nothing is cut."""
        return {**super().sizes_at(layout, shape), self.max_completion_field: int(shape.generated)}

    def traced_plan(self, plan: TrainingPlan, layout: Layout, shape: Shape) -> TrainingPlan:
        """Return a plan for a trace, in which TRL's own functions replace the reward functions, and completions vLLM.

        A trace has no data for the user's functions, and vLLM does not run on a virtual device.
        """
        traced = super().traced_plan(plan, layout, shape)
        args = dict(traced.args)
        if args.get("use_vllm"):
            args.pop("vllm_enable_sleep_mode", None)
            args[_MODE] = STAND_IN_SERVER
        return replace(traced, args=args, rewards=(NO_REWARD,) * len(plan.rewards))

    def traced_rows(self, layout: Layout, shape: Shape, trainable: float) -> tuple[tuple[int, ...], ...]:
        """Return prompts with the tokens of their completions.

        Completions differ by a token, so that each row but the last is padded: attention then needs a mask, which takes
        0.8 GiB for 16 rows of 4,200 tokens. If prompts of different lengths are completed together, that of the last
        row is shorter, and generation needs a mask, too. With one row per micro-batch, the last row is in another
        micro-batch of the generation batch.
        """
        generated = int(shape.generated)
        # A model generates from at least one token, even if the loss has none of the prompt.
        prompt = max(1, int(shape.tokens) - generated)
        if layout is Layout.EQUAL:
            return ((prompt, generated),) * shape.rows
        last = max(1, prompt - 1) if layout is Layout.PADDED else prompt
        return (*((prompt, max(1, generated - 1)),) * max(1, shape.rows - 1), (last, generated))

    def layout(self, plan: TrainingPlan, rows: int) -> Layout:
        """Return the layout of ``rows`` prompts that are completed together, which may differ in length."""
        return Layout.PADDED if rows > 1 else Layout.COMPLETED

    def refused(self, plan: TrainingPlan, workload: Workload) -> str | None:
        """Return a reason for a mode of vLLM that TRL does not have, which a trace replaces."""
        mode = plan.args.get(_MODE, COLOCATE)
        if plan.args.get("use_vllm") and mode not in (COLOCATE, SERVER):
            return f"TRL has no {_MODE}={mode}: it takes {COLOCATE} or {SERVER}"
        return None

    def copied_rows(self, batch: pa.RecordBatch, length: int | None) -> pa.RecordBatch:
        """Return all columns of the dataset, since reward functions may read them."""
        return batch.select([name for name in batch.schema.names if name not in (PROMPT, COMPLETION)])

    def completed(self, plan: TrainingPlan, workload: Workload) -> TrainingPlan:
        """Return the plan with the reward functions, if the trainer has any, and the assumed completions."""
        most, drawn = plan.count(self.max_completion_field), self.padded_together(plan)
        assumed = _completions(workload.rollouts.mean_tokens, workload.dataset.completions, most, drawn)
        rewards = (workload.rollouts.rewards or (NO_REWARD,)) if self.scores else ()
        return replace(plan, rewards=rewards, completions=assumed)


def check_reward_names(names: Iterable[str]) -> None:
    """Check that reward functions are named as TRL's scripts take them: by dotted path, or by TRL's own name.

    Raises:
        InputError: one is not.
    """
    unknown = [repr(name) for name in names if "." not in name and name not in TRL_REWARDS]
    if unknown:
        raise InputError(f"There is no reward function {' or '.join(unknown)} (reward_funcs).", hint=REWARD_HINT)


def _completions(mean_tokens: int | None, lengths: LengthDistribution | None, most: int, drawn: int) -> Completions:
    """Return the lengths of typical completions: the dataset's, the user's, or half of the maximum.

    Args:
        mean_tokens: the user's mean, or None.
        lengths: the dataset's, or None.
        most: the maximum, to which all are cut.
        drawn: number of completions that are padded together.
    """
    if lengths is None:
        mean = float(min(most, max(1, most // 2 if mean_tokens is None else mean_tokens)))
        return Completions(mean, mean)
    cut = lengths.cut_to(most)
    return Completions(cut.tokens / cut.rows, sum(share * tokens for tokens, share in widest_of(cut.counts, drawn)))
