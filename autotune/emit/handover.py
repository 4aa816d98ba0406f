"""Content of a bundle: a training with its measured or planned figures, and the comments above its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autotune.core.documents.bundle import Basis, ServerSplit
from autotune.core.documents.result import BaseFile
from autotune.core.machine import Hardware
from autotune.core.plan import TrainingPlan
from autotune.core.workload import Workload
from autotune.emit.arguments import PEFT_CONFIG, THREADS, thread_variables
from autotune.emit.launch import ACCELERATE, DEEPSPEED
from autotune.emit.rows import TrainingRows
from autotune.techniques.offload import optimizer_on_host
from autotune.trainers import find_trainer
from autotune.trainers.base import EVAL_STRATEGY
from autotune.trainers.prompts import PLACEHOLDER_REWARD
from autotune.units import plural


@dataclass(frozen=True)
class Handover:
    """One training with its figures, as the files of a bundle state it.

    Attributes:
        plan: the arguments of the training.
        workload, hardware: the workload and hardware of the training.
        basis: whether its figures are measured or planned.
        figures: its figures, their source and validity; one sentence each.
        timed: whether its speed is among them.
        threads: CPU threads of each process; None if the machine's cores are unknown.
        server: the vLLM server on the machine's first GPUs; None without a server.
        base: the user's configuration that it changes; None without one.
    """

    plan: TrainingPlan
    workload: Workload
    hardware: Hardware
    basis: Basis
    figures: tuple[str, ...]
    timed: bool = True
    threads: int | None = None
    server: ServerSplit | None = None
    base: BaseFile | None = None

    @property
    def env(self) -> Mapping[str, str]:
        """The environment variables of the training."""
        return {**self.plan.env, **thread_variables(self.threads)}

    @property
    def on_one_gpu(self) -> bool:
        """Whether one process trains on a GPU without a launcher: it must see no other GPU.

        TRL refuses to train if it sees several, since transformers would use ``nn.DataParallel``; online DPO lacks even
        this check.
        """
        return self.hardware.kind == "cuda" and not self.plan.in_group


def provenance(handover: Handover, rows: TrainingRows) -> Iterator[str]:
    """Yield the provenance of a training, one sentence each: figures, machine, versions and validity.

    Sentences on the use of the bundle's files follow.
    """
    plan, workload = handover.plan, handover.workload
    yield from _reward_sentences(handover)
    yield from handover.figures
    evaluation = workload.evaluation
    if evaluation is not None and (rows.evaluated or rows.test_size) is not None:
        own = handover.base.args.get("eval_strategy") if handover.base is not None and handover.base.text else None
        when = "at the end of each epoch" if own in (None, EVAL_STRATEGY) else f"by the file's eval_strategy: {own}"
        yield (
            f"Training is evaluated on {evaluation.name} {when}; eval_strategy and eval_steps change when. The speed "
            "excludes evaluations."
        )
    if rows.cut:
        yield (
            f"The rows in {rows.place} are the dataset's, tokenised and cut to {plan.truncate_to} tokens, "
            "because padding_free takes no max_length; they belong to this model's tokenizer."
        )
    trainer = find_trainer(plan.trainer)
    if not trainer.has_command:
        yield f"TRL has no command for {trainer.trainer_class}, so the bundle has only train.py."
    for profile in workload.profiles:
        if profile.dropped is not None:
            yield (
                f"{rows.place} has the rows of {profile.name} as they are, without {profile.dropped.rows} of "
                f"{profile.lengths.rows + profile.dropped.rows}: those with prompts over "
                f"{profile.dropped.longest_kept:,} tokens, which the trainer would not cut."
            )
    yield from _completion_sentences(handover)
    yield from _launch_sentences(handover)
    if plan.peft:
        yield f"The adapter is in {PEFT_CONFIG}, for which TRL's command line has no key: so there is no config.yaml."
    elif trainer.has_command and not trainer.runs_by_command(plan):
        yield (
            f"`trl {trainer.name}` reads its configuration in one process, before it starts the others, and refuses "
            "this one: the completions of one process alone in an evaluation (per_device_eval_batch_size) do not "
            "form whole groups (num_generations). So there is no config.yaml."
        )
    for model in (workload.model, workload.teacher):
        if model is not None and model.has_weights is False:
            yield f"{model.name} holds no weights; put them there, or name a model that has them."


def _launch_sentences(handover: Handover) -> Iterator[str]:
    plan = handover.plan
    if plan.in_group:
        processes = plural(plan.launch.processes, "process", "processes")
        moved = f" {ACCELERATE} has the path of {DEEPSPEED}; change that if you move it."
        yield f"`accelerate launch` starts {processes}.{moved if plan.args.get('deepspeed') else ''}"
    if handover.threads is None and optimizer_on_host(plan):
        yield (
            f"The optimizer runs on the host, and without {THREADS} a launcher gives each process one thread: set it to"
            " the cores of a machine divided by its processes."
        )
    if handover.hardware.kind == "cpu" and plan.args.get("fsdp"):
        behaviour = (
            "refuses the groups of processes there"
            if plan.parallelism
            else f"trains with DDP there, which needs more memory than was {handover.basis.value}"
        )
        yield f"On a CPU, accelerate has no FSDP: trl {behaviour}."


def _reward_sentences(handover: Handover) -> Iterator[str]:
    if handover.plan.rewards and not handover.workload.rollouts.rewards:
        yield PLACEHOLDER_REWARD


def _completion_sentences(handover: Handover) -> Iterator[str]:
    rollouts, completions, basis = handover.workload.rollouts, handover.plan.completions, handover.basis.value
    if completions is None:
        return
    kind = "as requested" if rollouts.mean_tokens is not None else "half of the maximum, the default"
    if rollouts.column is not None:
        kind = f"as in the column {rollouts.column}"
    speed = f"Speed was {basis} with completions of {completions.mean:,.0f} tokens on average ({kind}), memory"
    yield f"{speed if handover.timed else f'Memory was {basis}'} with completions as long as possible."
    rewards = ", ".join(rollouts.rewards)
    if rewards:
        # The names of TRL's own functions have no module.
        start = "; start training where Python finds its module" if "." in rewards else ""
        yield f"They are rewarded by {rewards}{start}."
