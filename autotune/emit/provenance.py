"""Describes the provenance of a bundle's training in sentences for the top of its files."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.emit.arguments import PEFT_CONFIG
from autotune.emit.handover import Handover
from autotune.emit.launch import ACCELERATE, DEEPSPEED
from autotune.emit.rows import TrainingRows
from autotune.trainers import find_trainer


def provenance(given: Handover, rows: TrainingRows) -> Iterator[str]:
    """Yield the provenance of a training: figures, machine, versions and validity, a sentence each.

    After that comes what has to be known of the bundle's files.
    """
    plan, workload = given.plan, given.workload
    yield from given.figures
    evaluation = workload.evaluation
    if rows.evaluated is not None and evaluation is not None:
        yield (
            f"Training is evaluated on {evaluation.name} at the end of each epoch; eval_strategy and eval_steps change "
            "when. The speed leaves that out."
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
    yield from _of_completions(given)
    yield from _of_launch(given)
    if plan.peft:
        yield f"The adapter is in {PEFT_CONFIG}, for which TRL's command line has no key: so there is no config.yaml."
    elif trainer.has_command and not trainer.runs_by_command(plan):
        yield (
            f"`trl {trainer.name}` reads its configuration in one process, before it starts the others, and refuses "
            "this one: the completions of one process alone are no whole groups (num_generations). So there is no "
            "config.yaml."
        )
    for model in (workload.model, workload.teacher):
        if model is not None and model.has_weights is False:
            yield f"{model.name} holds no weights; put them there, or name a model that has them."


def _of_launch(given: Handover) -> Iterator[str]:
    plan = given.plan
    if plan.in_group:
        count = plan.launch.processes
        processes = "1 process" if count == 1 else f"{count} processes"
        moved = f" It has the path of {DEEPSPEED}; change that if you move it." if plan.args.get("deepspeed") else ""
        yield f"`accelerate launch` starts {processes} by {ACCELERATE}.{moved}"
    if given.hardware.kind == "cpu" and plan.args.get("fsdp"):
        does = (
            "refuses the groups of processes there"
            if plan.parallelism
            else f"trains with DDP there, which needs more memory than was {given.basis.value}"
        )
        yield f"On a CPU, accelerate has no FSDP: trl {does}."


def _of_completions(given: Handover) -> Iterator[str]:
    rollouts, completions, basis = given.workload.rollouts, given.plan.completions, given.basis.value
    if completions is None:
        return
    kind = "as asked for" if rollouts.mean_tokens is not None else "half of the maximum, the default"
    if rollouts.column is not None:
        kind = f"as in the column {rollouts.column}"
    speed = f"Speed was {basis} with completions of {completions.mean:,.0f} tokens on average ({kind}), memory"
    yield f"{speed if given.timed else f'Memory was {basis}'} with completions as long as possible."
    rewards = ", ".join(given.plan.rewards)
    if rewards and rollouts.rewards:
        # TRL's own have no module in their names.
        start = "; start training where Python finds its module" if "." in rewards else ""
        yield f"They are rewarded by {rewards}{start}."
    elif rewards:
        yield (
            f"No reward function was named. {rewards}, which checks only length, stands in; replace it in reward_funcs."
        )
