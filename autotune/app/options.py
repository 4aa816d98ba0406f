"""The options of a run, checked before anything is started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from autotune.core.candidate import Choice
from autotune.core.effort import EFFORTS, Effort
from autotune.core.setting import GLOBAL_BATCH
from autotune.core.workload import Rollouts
from autotune.errors import InputError
from autotune.inspection.machine import Workers
from autotune.space import SpaceFile, Wishes, default_file, load
from autotune.techniques import find
from autotune.trainers import Trainer, find_trainer, trainers
from autotune.units import parse_duration

DEFAULT_TOKEN_COVERAGE = 0.99
# The largest share of a budget that it makes sense to leave unused.
_LARGEST_MARGIN = 0.5


@dataclass(frozen=True)
class Options:
    """A run as it was asked for; every field has been checked on its own.

    Attributes:
        num_processes: processes that train together, or None for one on each device, or for one to each worker.
        workers: how many probe at the same time, or None for one that has all of the machine.
        margin: share of the budget, 0 to 0.5, that stays free while probing.
        token_coverage: share of the dataset's tokens, 0 to 1, that must be kept.
        trials: most probes, or None for the effort's number.
        timeout_seconds: time limit of the whole search, or None.
        rollouts: what is known of prompts, generated completions and their rewards.
        coverage_asked: whether the user gave the token coverage.
    """

    trainer: Trainer
    device: Literal["auto", "cuda", "cpu"]
    num_processes: int | None
    workers: Workers | None
    margin: float
    global_batch_size: int | None
    token_coverage: float
    allowed: frozenset[str]
    wishes: Wishes
    file: SpaceFile
    effort: Effort
    trials: int | None
    timeout_seconds: float | None
    seed: int
    rollouts: Rollouts
    coverage_asked: bool = False


def checked_options(
    *,
    trainer: str,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    num_processes: int | None = None,
    workers: Workers | None = None,
    margin: float = 0.0,
    global_batch_size: int | None = None,
    max_length: int | None = None,
    token_coverage: float | None = None,
    allow: Iterable[str] = (),
    fix: Mapping[str, Choice] | None = None,
    exclude: Iterable[str] = (),
    space: str | Path | None = None,
    effort: str = "normal",
    trials: int | None = None,
    timeout: str | float | None = None,
    seed: int = 0,
    reward_funcs: Iterable[str] = (),
    completion_length: int | str | None = None,
    prompt_coverage: float | None = None,
) -> Options:
    """Return the options of a run; see :func:`autotune.probe` for what they mean, and for a user's defaults.

    What is not given here is not asked for: no margin, no limit, the shipped space.

    Raises:
        InputError: one of them cannot be used, or two contradict each other.
    """
    known = find_trainer(trainer)
    if device not in ("auto", "cuda", "cpu"):
        raise InputError(f"There is no device {device!r}.", hint="It is auto, cuda or cpu.")
    if effort not in EFFORTS:
        raise InputError(f"There is no effort {effort!r}.", hint=f"It is {', '.join(EFFORTS)}.")
    _check_range("margin", margin, 0.0, _LARGEST_MARGIN)
    _check_range("token coverage", 1.0 if token_coverage is None else token_coverage, 0.0, 1.0)
    numbers = {
        "global batch size": global_batch_size,
        "maximum length": max_length,
        "number of trials": trials,
        "number of processes": num_processes,
        "number of workers": None if workers == "auto" else workers,
    }
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise InputError(f"A {name} of {number} is not possible.", hint="It is at least 1.")
    if max_length is not None and token_coverage is not None:
        raise InputError("--max-length and --token-coverage contradict each other.", hint="Give one of them.")
    fixed = dict(fix or {})
    if max_length is not None and str(fixed.setdefault("max_length", max_length)) != str(max_length):
        raise InputError(f"--max-length {max_length} contradicts --fix max_length={fixed['max_length']}.")
    fixed = {knob: find(knob, known.techniques).parse(choice) for knob, choice in fixed.items()}
    excluded = frozenset(find(knob, known.techniques).name for knob in exclude)
    both = sorted(excluded & fixed.keys())
    if both:
        raise InputError(f"{both[0]} is both fixed and excluded.", hint="Give one of --fix and --exclude.")
    return Options(
        trainer=known,
        device=device,
        num_processes=num_processes,
        workers=workers,
        margin=margin,
        global_batch_size=global_batch_size,
        token_coverage=DEFAULT_TOKEN_COVERAGE if token_coverage is None else token_coverage,
        # Fixing a choice by name allows it.
        allowed=frozenset(_allowed(knob, known) for knob in allow) | fixed.keys(),
        wishes=Wishes(fixed, excluded),
        file=load(Path(space) if space is not None else default_file(trainer), trainer, known.techniques),
        effort=EFFORTS[effort],
        trials=trials,
        timeout_seconds=parse_duration(timeout) if isinstance(timeout, str) else timeout,
        seed=seed,
        rollouts=_rollouts(known, tuple(reward_funcs), completion_length, prompt_coverage),
        coverage_asked=token_coverage is not None,
    )


def _rollouts(trainer: Trainer, rewards: tuple[str, ...], length: int | str | None, coverage: float | None) -> Rollouts:
    asked = {
        "--reward-funcs": bool(rewards),
        "--completion-length": length is not None,
        "--prompt-coverage": coverage is not None,
    }
    given = [option for option, is_given in asked.items() if is_given]
    if given and not trainer.generates:
        takers = ", ".join(item.name for item in trainers().values() if item.generates)
        raise InputError(
            f"{trainer.label} generates no completions, so {given[0]} means nothing.", hint=f"It is for {takers}."
        )
    if coverage is not None and not 0 < coverage <= 1:
        raise InputError(f"A prompt coverage of {coverage} is not possible.", hint="It lies above 0, and is at most 1.")
    found = Rollouts(rewards, prompt_coverage=1.0 if coverage is None else coverage)
    if isinstance(length, str) and not length.lstrip("-").isdigit():
        return replace(found, column=length)
    tokens = None if length is None else int(length)
    if tokens is not None and tokens < 1:
        raise InputError(f"A completion length of {tokens} is not possible.", hint="It is at least 1 token.")
    return replace(found, mean_tokens=tokens)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InputError(f"A {name} of {value} is not possible.", hint=f"It lies between {low:g} and {high:g}.")


def _allowed(name: str, trainer: Trainer) -> str:
    return name if name == GLOBAL_BATCH else find(name, trainer.techniques).name


def check_evaluation(trainer: Trainer, *, evaluates: bool) -> None:
    """Check that a trainer can be evaluated, if it is asked to.

    Raises:
        InputError: TRL's trainer fails to.
    """
    if evaluates and not trainer.evaluates:
        raise InputError(
            f"TRL's {trainer.trainer_class} cannot be evaluated while training: its evaluation fails.",
            hint="Leave out --eval-dataset and --eval-split, and evaluate checkpoints by other means.",
        )
