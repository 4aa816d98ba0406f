"""Checks and converts the options of a run before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.app.arguments import PlannedArguments, ProbeArguments, SearchArguments, check_range, time_limit
from autotune.core.candidate import Choice
from autotune.core.setting import GLOBAL_BATCH
from autotune.core.workload import Init, ModelSource, Rollouts
from autotune.errors import InputError
from autotune.inspection.model import model_source
from autotune.inspection.paths import user_path
from autotune.inspection.space_file import default_file, load
from autotune.space import SpaceFile
from autotune.techniques import find, peft_config
from autotune.techniques.context_parallel import NAME as CONTEXT_PARALLEL
from autotune.trainers import DEFAULT, find_trainer, trainers
from autotune.trainers.base import Trainer

DEFAULT_TOKEN_COVERAGE = 0.99
MAX_TOKENS = 1 << 24
"""Maximum number of tokens of a traced micro-batch, so that sizes of tensors stay within 64 bits."""
# Largest margin: share of the budget that probes leave free.
_LARGEST_MARGIN = 0.5
_ROWS = "Give a DATASET, not --seq-len."
_LARGEST_SEED = (1 << 31) - 1
"""NumPy takes 32-bit seeds (``RandomState`` of Optuna's samplers). A resumed search adds its number of trials to the
seed, so the user may use half of the range."""


@dataclass(frozen=True)
class Options:
    """The checked and converted options.

    Attributes:
        token_coverage: least share to keep of the dataset's tokens and of those in the loss, 0 to 1.
        fixed: by knob, the choice that the user fixed.
        excluded: the excluded knobs.
        rollouts: prompts, generated completions and their rewards.
        teacher: the model to imitate, for trainers with a teacher; None until a base is read that may name it.
        coverage_asked: whether the user gave the token coverage.
    """

    trainer: Trainer
    global_batch_size: int | None
    token_coverage: float
    allowed: frozenset[str]
    fixed: Mapping[str, Choice]
    excluded: frozenset[str]
    file: SpaceFile
    rollouts: Rollouts
    coverage_asked: bool
    teacher: ModelSource | None = None

    @property
    def ranks_per_row(self) -> int:
        """Number of processes that share a row if the user fixed it, else 1."""
        return int(self.fixed.get(CONTEXT_PARALLEL, 1))

    @property
    def peft(self) -> Choice:
        """The PEFT configuration that the user fixed, or ``none``."""
        return self.fixed.get(peft_config.PeftConfig.name, peft_config.NONE)


def checked_options(args: SearchArguments, init: Init = "random") -> Options:
    """Return the options of every search.

    Args:
        init: how the weights of a teacher are initialised.

    Raises:
        InputError: one of them cannot be used, or two contradict each other.
    """
    trainer = find_trainer(args.trainer or DEFAULT)
    check_evaluation(trainer, evaluates=args.evaluates)
    max_length, coverage = args.max_length, args.token_coverage
    check_range("A token coverage of {}", coverage, 0, 1)
    check_range("A global batch size of {}", args.global_batch_size)
    check_range("A maximum length of {}", max_length)
    check_range("A number of processes of {}", args.num_processes)
    if max_length is not None and not _has_max_length(trainer):
        raise InputError(
            f"{trainer.label} cuts no prompts, so it takes no --max-length.",
            hint="--prompt-coverage drops the longest prompts.",
        )
    fixed = dict(args.fix or {})
    if max_length is not None and str(fixed.setdefault("max_length", max_length)) != str(max_length):
        raise InputError(
            f"--max-length {max_length} contradicts --fix max_length={fixed['max_length']}.", hint="Give one of them."
        )
    fixed = {knob: find(knob, trainer.techniques).parse(choice) for knob, choice in fixed.items()}
    # A length in words, such as `coverage`, follows from the token coverage.
    if coverage is not None and isinstance(fixed.get("max_length"), int):
        given = "--max-length" if max_length is not None else "--fix max_length"
        raise InputError(f"{given} and --token-coverage contradict each other.", hint="Give one of them.")
    for knob in (*args.exclude, *(each for each in args.allow if each != GLOBAL_BATCH)):
        find(knob, trainer.techniques)
    both = sorted(fixed.keys() & args.exclude)
    if both:
        raise InputError(f"{both[0]} is both fixed and excluded.", hint="Give one of --fix and --exclude.")
    file = user_path(args.space) if args.space is not None else default_file(trainer.name)
    return Options(
        trainer=trainer,
        global_batch_size=args.global_batch_size,
        token_coverage=DEFAULT_TOKEN_COVERAGE if coverage is None else coverage,
        # Fixing a choice by name allows it.
        allowed=frozenset(args.allow) | fixed.keys(),
        fixed=fixed,
        excluded=frozenset(args.exclude),
        file=load(file, trainer.name, trainer.techniques),
        rollouts=_rollouts(trainer, args),
        coverage_asked=coverage is not None,
        teacher=_teacher(trainer, args.teacher, init),
    )


def probe_options(args: ProbeArguments) -> Options:
    """Return the options of a search by probes.

    Raises:
        InputError: as in :func:`checked_options`.
    """
    check_range("A margin of {}", args.margin, 0, _LARGEST_MARGIN)
    check_range("A number of trials of {}", args.trials)
    check_range("A number of workers of {}", args.workers)
    check_range("A seed of {}", args.seed, 0, _LARGEST_SEED)
    if args.study is not None and args.storage is None:
        raise InputError(
            f"--study {args.study} names a study in a storage, and none is given.",
            hint="Name one with --storage, or leave out --study: an output directory has one study.",
        )
    time_limit(args.timeout)
    options = checked_options(args, args.init)
    # A base may name the teacher.
    return options if args.base is not None else _with_teacher(options)


def plan_options(args: PlannedArguments) -> Options:
    """Return the options of a plan on a dataset, or on rows of one length.

    Raises:
        InputError: as in :func:`checked_options`; or the rows are not given in exactly one way.
    """
    length = args.seq_len
    if (args.dataset is None) == (length is None):
        given = "neither" if args.dataset is None else "both"
        raise InputError(f"A plan needs a DATASET or --seq-len, and has {given}.", hint="Give one of them.")
    if length is None:
        return _with_teacher(checked_options(args))
    if args.evaluates:
        raise InputError("There are rows to evaluate on and none to train on.", hint=_ROWS)
    check_range("A length of {} tokens", length, 1, MAX_TOKENS)
    for name, what, hint in (("token", "rows", "Give --max-length to cut them."), ("prompt", "prompts", _ROWS)):
        if getattr(args, f"{name}_coverage") is not None:
            raise InputError(f"--{name}-coverage has no effect on {what} that are all --seq-len long.", hint=hint)
    # Rows of one length are kept whole, unless the user sets a maximum length or the trainer cuts no rows.
    cuts = _has_max_length(find_trainer(args.trainer))
    sets_length = args.max_length is not None or "max_length" in (*(args.fix or ()), *args.exclude)
    return _with_teacher(checked_options(replace(args, max_length=length) if cuts and not sets_length else args))


def _with_teacher(options: Options) -> Options:
    """Return options that name a teacher if the trainer needs one.

    Raises:
        InputError: the trainer needs a teacher, and none is named.
    """
    if options.trainer.has_teacher and options.teacher is None:
        raise InputError(f"{options.trainer.label} needs a teacher.", hint="Name one with --teacher MODEL.")
    return options


def _teacher(trainer: Trainer, name: str | Path | None, init: Init) -> ModelSource | None:
    if name is None:
        return None
    if not trainer.has_teacher:
        raise _not_for(trainer, "has no teacher", "--teacher", "has_teacher")
    return model_source(name, init, tokenizes=False)


def _has_max_length(trainer: Trainer) -> bool:
    return any(technique.name == "max_length" for technique in trainer.techniques)


def _not_for(trainer: Trainer, lack: str, option: str, ability: str) -> InputError:
    """Return the error for an option that applies only to trainers with an ability (a true field of their class)."""
    takers = ", ".join(item.name for item in trainers().values() if getattr(item, ability))
    return InputError(f"{trainer.label} {lack}, so it takes no {option}.", hint=f"It is for {takers}.")


def _rollouts(trainer: Trainer, args: SearchArguments) -> Rollouts:
    rewards, length, coverage = tuple(args.reward_funcs), args.completion_length, args.prompt_coverage
    named = {"--reward-funcs": rewards or None, "--completion-length": length, "--prompt-coverage": coverage}
    given = [option for option, value in named.items() if value is not None]
    if rewards and not trainer.scores:
        raise _not_for(trainer, "has no reward functions", "--reward-funcs", "scores")
    if given and not trainer.generates:
        raise _not_for(trainer, "generates no completions", given[0], "generates")
    if coverage is not None and not 0 < coverage <= 1:
        raise InputError(f"A prompt coverage of {coverage} is not possible.", hint="It lies above 0, and is at most 1.")
    found = Rollouts(rewards, prompt_coverage=1.0 if coverage is None else coverage)
    if isinstance(length, str) and not length.removeprefix("-").isdecimal():
        return replace(found, column=length)
    tokens = None if length is None else int(length)
    check_range("A completion length of {}", tokens)
    return replace(found, mean_tokens=tokens)


def check_evaluation(trainer: Trainer, *, evaluates: bool) -> None:
    """Check that TRL's trainer can evaluate, if evaluation is requested.

    Raises:
        InputError: TRL's trainer fails in evaluation.
    """
    if evaluates and not trainer.evaluates:
        raise InputError(
            f"TRL's {trainer.trainer_class} cannot be evaluated while training: its evaluation fails.",
            hint="Leave out --eval-dataset and --eval-split, and evaluate checkpoints by other means.",
        )
