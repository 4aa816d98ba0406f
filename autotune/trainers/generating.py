"""The base of trainers that generate completions for several micro-batches at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.core.batch_geometry import BatchGeometry, Layout, PhaseGeometry, Shape, Typical, rounded_up
from autotune.core.candidate import Candidate
from autotune.core.documents import Document, Documents
from autotune.core.plan import TrainingPlan
from autotune.core.program import StepProgram, program
from autotune.core.representatives import MOST, representatives
from autotune.core.setting import Setting
from autotune.core.workload import Workload
from autotune.trainers.geometry import evaluated_rows_of, micro_batches_of, number, rows_of, widest_of
from autotune.trainers.prompts import (
    GENERATED_SIZES,
    GENERATION,
    REFERENCE_PASS,
    SCORING,
    Prompted,
    prompt_counts,
    required,
)

OLD_PASS = "old log-probabilities"
"""The forward pass, without gradients, that later updates of the same completions are compared with."""
FIELDS = frozenset({
    "beta", "cache_implementation", "chat_template_kwargs", "disable_dropout", "ds3_gather_for_generation", "epsilon",
    "epsilon_high", "generation_batch_size", "generation_kwargs", "log_completions", "log_multimodal",
    "log_unique_prompts", "mask_truncated_completions", "max_completion_length", "min_p", "model_init_kwargs",
    "num_completions_to_print", "num_generations", "num_generations_eval", "num_iterations", "pad_to_multiple_of",
    "ref_model_mixup_alpha", "ref_model_sync_steps", "repetition_penalty", "reward_weights", "router_aux_loss_coef",
    "shuffle_dataset", "steps_per_generation", "sync_ref_model", "temperature", "top_k", "top_p",
    "transformers_continuous_batching_config", "trust_remote_code", "use_transformers_continuous_batching",
    "use_transformers_paged", "use_vllm", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_group_port",
    "vllm_max_model_length", "vllm_mode", "vllm_model_impl", "vllm_server_base_url", "vllm_server_host",
    "vllm_server_port", "vllm_server_timeout", "vllm_structured_outputs_regex", "vllm_tensor_parallel_size",
})  # fmt: skip
"""Fields of the configurations of all such trainers that ``transformers.TrainingArguments`` lacks."""
TRACED = frozenset({
    "cache_implementation", "disable_dropout", "epsilon", "epsilon_high", "mask_truncated_completions", "min_p",
    "num_generations_eval", "repetition_penalty", "reward_weights", "router_aux_loss_coef", "temperature", "top_k",
    "top_p",
})  # fmt: skip
"""Those that are passed to the traced trainer unchanged; see :class:`~autotune.trainers.base.ConfigFields`."""
# The class fills in steps_per_generation from generation_batch_size, and the other way round.
WITHOUT_EFFECT = frozenset({
    "chat_template_kwargs", "generation_batch_size", "log_completions", "log_multimodal", "log_unique_prompts",
    "model_init_kwargs", "num_completions_to_print", "ref_model_mixup_alpha", "ref_model_sync_steps",
    "shuffle_dataset", "trust_remote_code", "vllm_group_port", "vllm_server_base_url", "vllm_server_host",
    "vllm_server_port", "vllm_server_timeout",
})  # fmt: skip
"""Those without effect on memory and time of a step."""
TRACED_GENERATION = 2
"""Micro-batches of the generation batch in a trace: completions of two prompts divide into micro-batches of one row."""


class Generating(Prompted):
    """Prompts, each with several completions, which are generated for one or more micro-batches at once.

    Prompts are never cut. A micro-batch is as wide as the longest prompt and the longest completion of its generation
    batch together, since both are padded apart, before the generation batch is divided into micro-batches.
    """

    counted = "completions"
    most_field = "max_completion_length"

    @abstractmethod
    def compares_with_old(self, plan: TrainingPlan, *, aligned: bool) -> bool:
        """Return whether the old log-probabilities are computed.

        Args:
            aligned: whether every optimizer step begins with completions of the present model.
        """

    def vllm_limits(self, plan: TrainingPlan) -> tuple[int | None, int]:
        """Return the plan's value, and the completions of a generation batch (``max_num_seqs``)."""
        return number(plan, "vllm_max_model_length"), rows_of(plan) * steps_per_generation(plan)

    def document(self, lengths: tuple[Any, ...]) -> Document:
        """Return the prompt, which is kept at any length."""
        return (1, lengths[0])

    def geometry(self, plan: TrainingPlan, documents: Documents) -> BatchGeometry:
        """Return the geometry of prompts and completions, each padded to the longest of their generation batch."""
        rows, micro_batches, uses = rows_of(plan), micro_batches_of(plan), uses_of(plan)
        copies, multiple = required(plan, "num_generations"), number(plan, "pad_to_multiple_of") or 1
        most, assumed = required(plan, self.most_field), plan.completions
        assert assumed is not None
        generated = rows * steps_per_generation(plan)
        prompts = max(1, generated // copies)
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

        return BatchGeometry(
            layout=Layout.PADDED,
            worst=worst,
            sizes=sizes(rows),
            tokens=rows * (documents.tokens / documents.rows + assumed.mean),
            micro_batches=micro_batches,
            documents=float(rows * micro_batches * plan.data_ranks),
            ranks=plan.data_ranks,
            rows=documents.rows * copies * (uses // steps_per_generation(plan)),
            apart=tuple(
                # The two passes go through the generation batch in chunks of a micro-batch's size.
                PhaseGeometry(name, worst, sizes(rows), micro_batches / uses * steps_per_generation(plan))
                if name in (OLD_PASS, REFERENCE_PASS)
                else PhaseGeometry(
                    name, replace(worst, rows=traced), sizes(traced, GENERATED_SIZES), micro_batches / uses
                )
                # Those that a plan has not are no part of its traces. Sizes alone decide the geometry.
                for name in (GENERATION, OLD_PASS, REFERENCE_PASS, SCORING)
            ),
        )

    def evaluated(self, plan: TrainingPlan, documents: Documents, rows: int) -> BatchGeometry:
        """Return the geometry of evaluation, which generates, scores and compares each micro-batch by itself."""
        groups = {"num_generations": self.evaluated_copies(plan)}
        found = super().evaluated(replace(plan, args={**plan.args, **groups}), documents, rows)
        return replace(found, apart=())

    def copies(self, plan: TrainingPlan) -> int:
        """Return the completions of a prompt."""
        return required(plan, "num_generations")

    def evaluated_copies(self, plan: TrainingPlan) -> int:
        """Return the completions of a prompt that is evaluated on (``GRPOConfig.num_generations_eval``)."""
        return number(plan, "num_generations_eval") or self.copies(plan)

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
        if plan.evaluates:
            # Any number of rows has to be a number of whole groups.
            args["num_generations_eval"] = shape.rows
        return replace(traced, args=args)

    def phases(self, plan: TrainingPlan) -> StepProgram:
        """Return a program whose generations come before the micro-batches that are trained on them."""
        old = self.compares_with_old(plan, aligned=_aligned(plan))
        return program(
            in_generation=(
                GENERATION,
                *((OLD_PASS,) if old else ()),
                *((REFERENCE_PASS,) if plan.args.get("beta") else ()),
                SCORING,
            )
        )

    def padded_together(self, plan: TrainingPlan) -> int:
        """Return the completions of a generation batch."""
        return rows_of(plan) * steps_per_generation(plan)

    def runs_by_command(self, plan: TrainingPlan) -> bool:
        """Return whether ``trl NAME --config`` trains by a plan: one process alone has whole groups of completions.

        The command makes the configuration before it starts other processes, and so counts itself alone (TRL 1.16,
        ``trl/cli/commands/training.py``).
        """
        return super().runs_by_command(plan) and _broken_groups(plan, ranks=1) is None

    def rule(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return why TRL cannot train by the plan of a candidate, or mixes completions of two models in a step."""
        plan = self.plan(candidate, setting)
        refused = self.refused(plan, setting.workload)
        if refused is not None:
            return refused
        alone = _broken_groups(plan, ranks=1)
        if setting.base is not None and alone is not None:
            return f"`trl {self.name}` reads the edited {setting.base.file} in one process, and in that {alone}"
        uses, micro_batches = uses_of(plan), micro_batches_of(plan)
        if micro_batches % uses and uses % micro_batches:
            return (
                f"{uses} micro-batches are trained on one generation, which is neither a part nor a multiple of the "
                f"{micro_batches} of an optimizer step"
            )
        return None

    def refused(self, plan: TrainingPlan, workload: Workload) -> str | None:
        """Return why generation or evaluation cannot have whole groups of completions from the given prompts."""
        broken = _broken_groups(plan, plan.data_ranks)
        if broken is not None:
            return broken
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


def _broken_groups(plan: TrainingPlan, ranks: int) -> str | None:
    """Return why this number of processes would split a group of completions, in words, or None."""
    copies, completions = required(plan, "num_generations"), rows_of(plan) * steps_per_generation(plan) * ranks
    if completions % copies:
        return (
            f"a generation batch of {completions} completions cannot be divided into groups of the {copies} "
            "completions of one prompt (num_generations)"
        )
    evaluated = evaluated_rows_of(plan) * ranks if plan.evaluates else 0
    together = number(plan, "num_generations_eval") or copies
    if evaluated % together:
        return (
            f"an evaluation batch of {evaluated} completions (per_device_eval_batch_size) cannot be divided into "
            f"groups of the {together} completions of one prompt (num_generations)"
        )
    return None


def _aligned(plan: TrainingPlan) -> bool:
    """Whether every optimizer step begins with completions of the present model (trl/trainer/grpo_trainer.py)."""
    return micro_batches_of(plan) % uses_of(plan) == 0
