"""Describes the provenance of a recommendation in sentences for the top of the bundle's files."""

from __future__ import annotations

from autotune.core.result import Choosable, Result
from autotune.core.status import RunStatus
from autotune.emit.arguments import PEFT_CONFIG
from autotune.emit.launch import ACCELERATE, DEEPSPEED, launches
from autotune.emit.rows import TrainingRows
from autotune.trainers import find_trainer
from autotune.units import format_bytes, format_rate

_SOFTWARE = ("torch", "transformers", "trl", "peft", "accelerate", "driver")


def provenance(result: Result, chosen: Choosable, rows: TrainingRows) -> tuple[str, ...]:
    """Return what was measured, on which machine, with which versions, and its validity; one sentence each."""
    sentences = [_what(result), _where(result), _measured(chosen), _beside(result), _confirmed(result)]
    sentences.append(
        "These figures hold for this model, dataset, device and software; for any other, run autotune again."
    )
    evaluation = result.workload.evaluation
    if rows.evaluated is not None and evaluation is not None:
        sentences.append(
            f"Training is evaluated on {evaluation.name} at the end of each epoch; eval_strategy and eval_steps change "
            "when. The speed leaves that out."
        )
    if rows.cut:
        sentences.append(
            f"The rows in {rows.place} are the dataset's, tokenised and cut to {chosen.plan.truncate_to} tokens, "
            "because padding_free takes no max_length; they belong to this model's tokenizer."
        )
    trainer = find_trainer(result.trainer)
    if not trainer.has_command:
        sentences.append(f"TRL has no command for {trainer.trainer_class}, so there is no config.yaml beside train.py.")
    sentences += [
        f"{rows.place} has the rows of {profile.name} as they are, without {profile.dropped.rows} of "
        f"{profile.lengths.rows + profile.dropped.rows}: those with prompts over {profile.dropped.longest_kept:,} "
        "tokens, which the trainer would not cut."
        for profile in result.workload.profiles
        if profile.dropped is not None
    ]
    if chosen.plan.completions is not None:
        sentences += _of_completions(result, chosen)
    if launches(chosen.plan):
        count = chosen.plan.launch.processes
        moved = (
            f" It says where {DEEPSPEED} is; change that if you move it." if chosen.plan.args.get("deepspeed") else ""
        )
        sentences.append(
            f"{ACCELERATE} says how `accelerate launch` starts {'1 process' if count == 1 else f'{count} processes'}."
            + moved
        )
    if result.hardware.kind == "cpu" and chosen.plan.args.get("fsdp"):
        does = (
            "refuses the groups of processes there"
            if chosen.plan.parallelism
            else "trains with DDP there, which needs more memory than was measured"
        )
        sentences.append(f"On a CPU, accelerate has no FSDP: trl {does}.")
    if chosen.plan.peft:
        sentences.append(
            f"What is trained is in {PEFT_CONFIG}, for which TRL's command line has no key: so there is no config.yaml."
        )
    if result.workload.model.has_weights is False:
        sentences.append(
            f"{result.workload.model_source.name} holds no weights; put them there, or name a model that has them."
        )
    return tuple(sentence for sentence in sentences if sentence)


def _of_completions(result: Result, chosen: Choosable) -> tuple[str, str]:
    rollouts, completions = result.workload.rollouts, chosen.plan.completions
    assert completions is not None
    said = "as asked for" if rollouts.mean_tokens is not None else "half of the maximum, since nothing else was said"
    if rollouts.column is not None:
        said = f"as in the column {rollouts.column}"
    assumed = f"Speed was measured with completions of {completions.mean:,.0f} tokens on average ({said}), memory with "
    rewards = ", ".join(chosen.plan.rewards)
    scored = (
        f"They are rewarded by {rewards}; start training where Python finds its module."
        if rollouts.rewards
        else f"No reward function was named: {rewards}, which only looks at lengths, holds its place in reward_funcs."
    )
    return f"{assumed}completions as long as possible.", scored


def _what(result: Result) -> str:
    workload = result.workload
    return (
        f"Recommended by autotune for {workload.model.name} on {workload.dataset.name}, global batch "
        f"{result.global_batch_size}, budget {format_bytes(result.budget_bytes)}."
    )


def _where(result: Result) -> str:
    hardware = result.hardware
    processes = "1 process" if hardware.processes == 1 else f"{hardware.processes} processes"
    software = ", ".join(f"{name} {result.environment[name]}" for name in _SOFTWARE if name in result.environment)
    device = f"{hardware.name} ({format_bytes(hardware.memory_bytes)})"
    return f"Measured on {device}, {processes}, with {software}." if software else f"Measured on {device}, {processes}."


def _measured(chosen: Choosable) -> str:
    parts = []
    if chosen.peak_bytes is not None:
        parts.append(f"peak memory {format_bytes(chosen.peak_bytes)} on the worst batch")
    if chosen.tokens_per_second is not None:
        parts.append(f"{format_rate(chosen.tokens_per_second)} on typical ones{_expected(chosen)}")
    return f"It showed {' and '.join(parts)}." if parts else ""


def _expected(chosen: Choosable) -> str:
    low, high = chosen.tokens_per_second_low, chosen.tokens_per_second_high
    if low is None or high is None:
        return " in one run"
    return f" in {chosen.runs} runs, of which a further one is expected between {low:,.0f} and {high:,.0f}"


def _beside(result: Result) -> str:
    baseline = result.baseline
    if result.speedup is not None and baseline is not None and baseline.tokens_per_second is not None:
        low, high = result.speedup_low, result.speedup_high
        between = f" ({low:.2f} to {high:.2f})" if low is not None and high is not None else ""
        did = format_rate(baseline.tokens_per_second)
        return f"{_name(result)} did {did}: {result.speedup:.2f}{between} times slower."
    if baseline is not None and baseline.reason:
        return f"{_name(result)} did not run: {baseline.reason.rstrip('.')}."
    return ""


def _name(result: Result) -> str:
    return result.base.file if result.base is not None else "TRL's default"


def _confirmed(result: Result) -> str:
    if result.status is RunStatus.INTERRUPTED:
        longer = "a longer run confirmed it" if result.confirmed else "no longer run has confirmed it"
        return f"The search was interrupted: this was the best so far, and {longer}."
    return "A longer run confirmed it." if result.confirmed else "No longer run has confirmed it."
