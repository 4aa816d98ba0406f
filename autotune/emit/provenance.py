"""Describes the provenance of a bundle's training in sentences for the top of its files."""

from __future__ import annotations

from autotune.emit.arguments import PEFT_CONFIG
from autotune.emit.handover import Handover
from autotune.emit.launch import ACCELERATE, DEEPSPEED, launches
from autotune.emit.rows import TrainingRows
from autotune.trainers import find_trainer


def provenance(given: Handover, rows: TrainingRows) -> tuple[str, ...]:
    """Return the provenance of a training: figures, machine, versions and validity, a sentence each.

    After that comes what has to be known of the bundle's files.
    """
    plan, workload = given.plan, given.workload
    sentences = [*given.figures]
    evaluation = workload.evaluation
    if rows.evaluated is not None and evaluation is not None:
        sentences.append(
            f"Training is evaluated on {evaluation.name} at the end of each epoch; eval_strategy and eval_steps change "
            "when. The speed leaves that out."
        )
    if rows.cut:
        sentences.append(
            f"The rows in {rows.place} are the dataset's, tokenised and cut to {plan.truncate_to} tokens, "
            "because padding_free takes no max_length; they belong to this model's tokenizer."
        )
    trainer = find_trainer(plan.trainer)
    if not trainer.has_command:
        sentences.append(f"TRL has no command for {trainer.trainer_class}, so the bundle has only train.py.")
    sentences += [
        f"{rows.place} has the rows of {profile.name} as they are, without {profile.dropped.rows} of "
        f"{profile.lengths.rows + profile.dropped.rows}: those with prompts over {profile.dropped.longest_kept:,} "
        "tokens, which the trainer would not cut."
        for profile in workload.profiles
        if profile.dropped is not None
    ]
    if plan.completions is not None:
        sentences += _of_completions(given)
    if launches(plan):
        count = plan.launch.processes
        moved = f" It has the path of {DEEPSPEED}; change that if you move it." if plan.args.get("deepspeed") else ""
        sentences.append(
            f"`accelerate launch` starts {'1 process' if count == 1 else f'{count} processes'} by {ACCELERATE}." + moved
        )
    if given.hardware.kind == "cpu" and plan.args.get("fsdp"):
        does = (
            "refuses the groups of processes there"
            if plan.parallelism
            else f"trains with DDP there, which needs more memory than was {given.basis.value}"
        )
        sentences.append(f"On a CPU, accelerate has no FSDP: trl {does}.")
    if plan.peft:
        sentences.append(
            f"The adapter is in {PEFT_CONFIG}, for which TRL's command line has no key: so there is no config.yaml."
        )
    elif trainer.has_command and not trainer.runs_by_command(plan):
        sentences.append(
            f"`trl {trainer.name}` reads its configuration in one process, before it starts the others, and refuses "
            "this one: the completions of one process alone are no whole groups (num_generations). So there is no "
            "config.yaml."
        )
    sentences += [
        f"{model.name} holds no weights; put them there, or name a model that has them."
        for model in (workload.model, workload.teacher)
        if model is not None and model.has_weights is False
    ]
    return tuple(sentences)


def _of_completions(given: Handover) -> tuple[str, ...]:
    rollouts, completions, basis = given.workload.rollouts, given.plan.completions, given.basis.value
    assert completions is not None
    kind = "as asked for" if rollouts.mean_tokens is not None else "half of the maximum, the default"
    if rollouts.column is not None:
        kind = f"as in the column {rollouts.column}"
    scored = _of_rewards(given) if given.plan.rewards else ()
    if not given.timed:
        return (f"Memory was {basis} with completions as long as possible.", *scored)
    assumed = f"Speed was {basis} with completions of {completions.mean:,.0f} tokens on average ({kind}), memory with "
    return (f"{assumed}completions as long as possible.", *scored)


def _of_rewards(given: Handover) -> tuple[str]:
    rewards = ", ".join(given.plan.rewards)
    if given.workload.rollouts.rewards:
        return (f"They are rewarded by {rewards}; start training where Python finds its module.",)
    return (f"No reward function was named: {rewards}, which only looks at lengths, holds its place in reward_funcs.",)
