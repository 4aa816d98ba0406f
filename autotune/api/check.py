"""``autotune.check``: whether a configuration will run, what it does silently, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.app.check.asked import Asked, Unsure
from autotune.app.check.check import check as checked
from autotune.app.check.check import check_each, check_object
from autotune.app.check.fix import fix_legacy as fixed
from autotune.core.events import Listener, ignore
from autotune.core.verdict import EXIT_CODES, Fixed, Outcome, Severity, Verdict
from autotune.errors import InputError, WillNotFit
from autotune.userconfig.launch import Launching

if TYPE_CHECKING:
    import peft
    import transformers


def check(
    config: str | Path | Sequence[str] | transformers.TrainingArguments,
    *,
    trainer: str | None = None,
    model: str | None = None,
    dataset: str | None = None,
    peft_config: peft.PeftConfig | None = None,
    gpu: str | None = None,
    memory_budget: str | int | None = None,
    probe: bool = False,
    timeout: str | float | None = None,
    imports: bool = False,
    fits: bool = True,
    when_unsure: Unsure | None = None,
    listener: Listener = ignore,
) -> Verdict:
    """Check a configuration before it is trained by: read it, judge its keys, and say whether its worst batch fits.

    Args:
        config: a YAML file of TRL's; or the words of the command that is about to run; or a configuration of one of
            TRL's trainers, such as a ``trl.DPOConfig``, for which ``model`` and ``dataset`` have to be given.
        trainer: which of TRL's trainers; None: as the command or the keys say.
        model: hub id, local directory, or ``config.json``; None: as the configuration says. No weights are needed.
        dataset: hub id, or a local file or directory; None: as the configuration says.
        peft_config: what is trained, for a configuration object; LoRA alone is understood.
        gpu: name of a GPU, such as ``H100-80GB``, a size such as ``24GiB``, or ``cpu``; None: this machine's device.
        memory_budget: memory that the training may need, such as ``24GiB`` or in bytes; None: all of the device.
        probe: whether to run the worst micro-batches on this machine's device, instead of tracing them.
        timeout: time after which that run is ended, such as ``10m`` or in seconds; the answer is not known then. None:
            no limit.
        imports: whether to import the modules of the configuration's own reward functions, in processes of their own.
        fits: whether to say if it fits; if not, no device, model or dataset is needed.
        when_unsure: ``pass`` or ``fail``: what an answer that is too close to call, or not known, counts as.
        listener: is told what happens.

    Returns:
        The verdict: it fits, or the answer is too close to call or unknown.

    Raises:
        WillNotFit: it will not fit, or cannot run at all. The error has the verdict.
        InputError: something that was given cannot be used.
        AutotuneError: processes cannot be started.
    """
    found = verdict(
        config,
        trainer=trainer,
        model=model,
        dataset=dataset,
        peft_config=peft_config,
        gpu=gpu,
        memory_budget=memory_budget,
        probe=probe,
        timeout=timeout,
        imports=imports,
        fits=fits,
        when_unsure=when_unsure,
        listener=listener,
    )
    if found.exit_code in (EXIT_CODES[Outcome.DOES_NOT_FIT], EXIT_CODES[Outcome.CANNOT_RUN]):
        raise stopped(found)
    return found


def stopped(found: Verdict) -> WillNotFit:
    """Return the error that says why a training should not start, and what would help."""
    return WillNotFit(f"{found.headline}.", found, hint=_hint(found))


def verdict(
    config: str | Path | Sequence[str] | transformers.TrainingArguments,
    *,
    peft_config: peft.PeftConfig | None = None,
    started: Launching | None = None,
    listener: Listener = ignore,
    **options: Any,
) -> Verdict:
    """Return the verdict of :func:`check`, whatever it is, instead of raising it.

    Args:
        started: how the processes of a configuration object's training were started; None: it is one process.

    Raises:
        InputError: something that was given cannot be used.
        AutotuneError: processes cannot be started.
    """
    if isinstance(config, (str, Path)):
        return checked(Asked(config=str(config), **options), listener)
    if isinstance(config, Sequence):
        return checked(Asked(command=tuple(config), **options), listener)
    return check_object(config, peft_config, Asked(**options), listener, started or Launching())


def verdicts(configs: Sequence[str | Path], *, listener: Listener = ignore, **options: Any) -> Iterator[Verdict]:
    """Yield the verdicts on several YAML files, in less time than one after another.

    Raises:
        InputError: something that was given cannot be used.
        AutotuneError: processes cannot be started.
    """
    yield from check_each((Asked(config=str(config), **options) for config in configs), listener)


def fix_legacy(config: str | Path, *, trainer: str | None = None, output: str | Path | None = None) -> Fixed:
    """Write a YAML file of TRL's with the keys that TRL has now; comments and order stay.

    Args:
        output: where to write; None: to the file itself.

    Raises:
        InputError: the file cannot be read or written, or does not say which trainer it is for.
    """
    if not isinstance(config, (str, Path)):
        raise InputError("Only a file can be rewritten.", hint="Give CONFIG.yaml.")
    return fixed(str(config), trainer, str(output) if output is not None else None)


def _hint(found: Verdict) -> str:
    errors = [item.message for item in found.findings if item.severity is Severity.ERROR]
    remedy = found.remedy
    if remedy is not None:
        errors.append(f"It would fit with {', '.join(f'{key}: {value}' for key, value in remedy.keys.items())}.")
    return " ".join(errors)
