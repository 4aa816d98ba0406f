"""Reports all problems of a configuration's keys at once, with their remedies."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path

from autotune.confidential import hidden
from autotune.core.configuration import Built, Configuration, Fault, Override, ReadCommand
from autotune.core.nested import Key, lookup, mapping
from autotune.core.plan import BEST_METRIC, EPOCHS, NO_EVALUATION
from autotune.core.verdict import Finding, Severity
from autotune.errors import InputError
from autotune.inspection.command_line import CONFIG, TRL, options_of
from autotune.inspection.legacy import legacy_of
from autotune.inspection.yaml_file import read_yaml
from autotune.trainers import find_trainer, trainers
from autotune.trainers.distillation import TEACHER_LOADING
from autotune.userconfig.deepspeed import AUTO, NAMED, contradictions, deepspeed_document
from autotune.userconfig.launch import PROCESS_OPTIONS, Launching, likely_processes
from autotune.userconfig.written import WrittenConfig

_ABSENT = ("ImportError", "ModuleNotFoundError", "PackageNotFoundError")
# Keys of accelerate's file that a note quotes.
_QUOTED = ("distributed_type", "num_processes", "mixed_precision")
_REMOTE_CODE, _RESUMED = "trust_remote_code", "resume_from_checkpoint"
# Similarity of names such as per_device_batch_size and per_device_train_batch_size.
_NEAR_AS_BEST = 0.05
_TOGETHER, _BY_ALL = "steps_per_generation", "generation_batch_size"
_GROUPS = re.compile(rf"{_BY_ALL} \((\d+)\) must be divisible by num_generations \((\d+)\)")
"""TRL's refusal of generation batches without whole groups (``GRPOConfig.__post_init__``)."""
_AT_LEAST_ONE = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "pad_to_multiple_of",
    "max_completion_length", "max_new_tokens", "num_generations", "num_iterations", _TOGETHER, _BY_ALL,
)  # fmt: skip
"""Numbers that must be at least 1: divisors, and counts of rows or tokens."""
_EVALUATED_ROWS, _EVALUATION = "per_device_eval_batch_size", "eval_strategy"
_STEPS = "max_steps"
_NEVER_NULL = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations", _STEPS)
"""Numbers for which TRL's classes accept null, although every training computes with them."""
_LOADING_FIELDS = ("model_init_kwargs", TEACHER_LOADING)
"""Mappings for which TRL's classes accept text, which TRL parses only where it begins with a brace."""

_REFUSED_IN_A_STEP = {
    # accelerate/utils/fsdp_utils.py; by default it takes ``_no_split_modules``, which some models have in part.
    "Could not find the transformer layer class": (
        "FSDP refuses the model unless transformer_layer_cls_to_wrap names the classes of its layers."
    ),
    # torch/amp/grad_scaler.py
    "Attempting to unscale FP16 gradients": "fp16 ends the first step of weights in float16. Write dtype: float32.",
    # autotune/virtual/unsupported.py
    "CUDA does not scale gradients in bfloat16": (
        "fp16 ends the first step of trained weights in bfloat16: those of dtype: bfloat16, or the adapters that TRL"
        " makes on a quantised model. Write bf16: true in its place, or, without bf16 on the GPU, bf16: false."
    ),
    # autotune/step/jobs/build.py
    "PyTorch cannot read the caching allocator's": "Write NAME:VALUE with commas between, and True or False.",
}
"""Beginnings of errors that occur only in a step, each with its remedy."""


def problems(written: WrittenConfig, read: ReadCommand, *, here: bool = True) -> tuple[Finding, ...]:
    """Return the problems and silent changes of a configuration, in the order of its file.

    Args:
        here: whether the training is for this machine; another one may have packages that this one lacks.
    """
    config = read.configurations.get(find_trainer(written.trainer).config_class)
    found = [*_faults(written, read), *_legacy(written, read), *_silent(written, read)]
    faulty = {fault.key for fault in read.faults}
    given = {name: value for name, value in written.given.items() if name not in faulty}
    found += of_values(written, config.values if config is not None else given)
    found += (
        finding(written, Severity.ERROR if here else Severity.NOTE, name, message)
        for name, message in read.absent.items()
    )
    absent = read.refused.startswith(_ABSENT) and not here
    if read.refused and not absent and not any(item.severity is Severity.ERROR for item in found):
        found.append(refusal_finding(written, read.refused))
    last = 1 << 30
    return tuple(sorted(found, key=lambda item: item.line or last))


def of_values(written: WrittenConfig, values: Mapping[str, object]) -> Iterator[Finding]:
    """Yield values that TRL's class accepts but that later end the training, or leave it almost without steps.

    Args:
        values: values of the trainer's configuration.
    """
    evaluates = values.get(_EVALUATION, NO_EVALUATION) != NO_EVALUATION
    loads = ("dataloader_prefetch_factor",) if values.get("dataloader_num_workers") else ()
    rows = (_EVALUATED_ROWS,) if evaluates else ()
    numbers = (*_AT_LEAST_ONE, *rows, *loads)
    low = [name for name in numbers if _is_below_one(values.get(name))]
    # TRL's class derives some of them from others.
    for name in [name for name in low if name in written.given] or low[:1]:
        yield finding(written, Severity.ERROR, name, f"{name} is {values[name]}, and has to be at least 1.")
    reasons = [find_trainer(written.trainer).refused_values(values)]
    nulls = [name for name in (*_NEVER_NULL, *rows) if values.get(name, 0) is None]
    reasons += [f"{name} is null, and the training computes with it" for name in nulls]
    by_epochs, epochs = _is_below_one(values.get(_STEPS)), values.get(EPOCHS)
    if by_epochs and isinstance(epochs, float) and not isfinite(epochs):
        reasons += [f"{EPOCHS} is {epochs}, and transformers computes the number of steps from it"]
    if values.get("save_strategy") == "best" and values.get(BEST_METRIC, "") is None:
        reasons += [f"save_strategy is best, and transformers refuses that without {BEST_METRIC}"]
    if values.get("eval_on_start") and not evaluates and written.own_command:
        reasons += [f"eval_on_start is true, and with {_EVALUATION}: no, TRL gives the trainer no rows to evaluate on"]
    # Trainer.evaluation_loop, and SyncRefModelCallback.on_step_end
    divides = {"eval_accumulation_steps": evaluates, "ref_model_sync_steps": values.get("sync_ref_model")}
    zeros = [name for name in divides if divides[name] and values.get(name) == 0]
    reasons += [f"{name} is 0, and steps are divided by it" for name in zeros]
    texts = [name for name in _LOADING_FIELDS if isinstance(values.get(name), str) and values[name]]
    reasons += [f"{name} is text, and TRL needs a mapping" for name in texts if not str(values[name]).startswith("{")]
    for reason in filter(None, reasons):
        yield finding(written, Severity.ERROR, mentioned(written, reason), f"{reason}.")
    # Trainer.set_initial_training_values, and DefaultFlowCallback.on_step_end
    if values.get(_STEPS) == 0:
        message = f"{_STEPS} is 0: transformers ends after the first step. Below 0, {EPOCHS} counts."
        yield finding(written, Severity.SILENT, _STEPS, message)
    elif by_epochs and epochs == 0:
        yield finding(written, Severity.SILENT, EPOCHS, f"{EPOCHS} is 0: transformers ends before the first step.")


def _is_below_one(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value < 1


def of_building(written: WrittenConfig, built: Built, known: Sequence[Finding], *, here: bool) -> Iterator[Finding]:
    """Yield the errors, overrides and warnings of the trainer's construction, unless they were already reported.

    Only messages that mention a key of the user are reported, since traces set some arguments themselves. A refusal
    that mentions none counts as reported if there is any other error: autotune's rules of trainers mirror TRL's.

    Args:
        here: whether the training is for this machine; another one may have packages that this one lacks.
    """
    reported = {item.key for item in known if item.severity is not Severity.NOTE}
    wrong, key = {item.key for item in known if item.severity is Severity.ERROR}, mentioned(written, built.refused)
    if built.refused.startswith(_ABSENT) and not here:
        message = f"On this machine it cannot be built: {_sentence(built.refused)}"
        yield finding(written, Severity.NOTE, key, message)
    elif built.refused and not (key in wrong or (wrong and not key)):
        yield refusal_finding(written, built.refused)
    if ended := _training_error(written, built):
        yield finding(written, Severity.ERROR, mentioned(written, ended), ended)
    for item in built.overrides:
        if item.key in written.given and item.key not in reported:
            yield _of_override(written, item)
    for warning in built.warnings:
        key = mentioned(written, warning)
        new = _of_warning(written, key, warning)
        if key and not (key in reported or _deprecates_written_key(written, warning) or new in known):
            reported.add(key)
            yield new


def _training_error(written: WrittenConfig, built: Built) -> str:
    """Return a sentence that the user's arguments end the training; empty if an error does not come from them."""
    reason, line = built.ended, built.raised_at
    for beginning, about in _REFUSED_IN_A_STEP.items():
        _, refused, rest = reason.partition(beginning)
        if refused:
            return f"{about} {refused}{rest}"
    if line.startswith("raise ") or mentioned(written, line):
        return f"{mentioned(written, f'{reason} {line}') or 'A step'} ends the training: {reason}"
    return ""


def of_launch(written: WrittenConfig, read: ReadCommand, started: Launching) -> Iterator[Finding]:
    """Yield settings of the launch without effect, and notes on defaults: accelerate's file, one process per GPU."""
    wrong = {fault.key for fault in read.faults}
    if written.command.launcher != TRL:
        for key in written.given:
            if key.replace("-", "_") in read.launch and key not in wrong:
                yield finding(written, Severity.SILENT, key, _dropped_text(written, key))
    if started.file and started.file == str(written.default):
        has = ", ".join(f"{name}: {started.document[name]}" for name in _QUOTED if name in started.document)
        message = f"No file for accelerate is named, so it reads its default, {started.file} ({has})."
        yield Finding(Severity.NOTE, message)
    launcher = written.command.launcher
    several = not started.counted and started.processes > 1
    if several or started.is_guessed:
        gpus, number = f"of {started.processes} GPUs", PROCESS_OPTIONS[launcher].format(started.processes)
        if not several:
            gpus, number = "GPU; one was checked", f"{PROCESS_OPTIONS[launcher].format(8)} for eight"
        message = f"Nothing sets the number of processes, so {launcher} starts one on each {gpus}. Write {number}."
        yield Finding(Severity.NOTE, message)
    if started.ignored_processes:
        message = (
            f"accelerate starts one process instead of {started.ignored_processes}: only distributed_type MULTI_GPU,"
            " FSDP or DEEPSPEED in its file starts several."
        )
        yield finding(written, Severity.SILENT, "num_processes", message)


def of_documents(written: WrittenConfig, started: Launching, config: Configuration) -> Iterator[Finding]:
    """Yield the contradictions between DeepSpeed's document and the trainer's arguments, with their lines.

    Raises:
        InputError: the document cannot be read.
    """
    document, as_set = (deepspeed_document(started.document, config, default) for default in (1, AUTO))
    if document is None or as_set is None:
        return
    file, around = _document_place(written, started, config)
    for item in contradictions(document, config, started.processes):
        key, line = ".".join(item.path), _line_in(file, (*around, *item.path))
        has = f"{key} is {item.value} in {file.name}"
        if lookup(as_set, item.path) == (AUTO,):
            has = f"{file.name} has no {key}, which accelerate takes for {item.value}"
        needs, instead = f"the trainer's arguments give {item.expected}", ""
        if item.field:
            own = written.line(item.field)
            place = f" ({Path(written.place).name}:{own})" if own is not None else ""
            needs = f"the trainer's {item.field} is {item.expected}{place}"
            instead = f", or {item.field}: {item.value} for the trainer"
        message = f"{has}, and {needs}: transformers ends the run. Write {key}: {AUTO} in {file.name}{instead}."
        yield Finding(Severity.ERROR, hidden(message), key, str(file) if line is not None else "", line)


def _document_place(written: WrittenConfig, started: Launching, config: Configuration) -> tuple[Path, Key]:
    """Return the file with DeepSpeed's document, and the path of its key there."""
    own = config.values.get("deepspeed")
    section = mapping(started.document.get("deepspeed_config"))
    named = own if isinstance(own, str) else section.get(NAMED) if not own else None
    if named:
        return Path(str(named)), ()
    return (Path(written.place), ("deepspeed",)) if own else (Path(started.file), ("deepspeed_config",))


def _line_in(file: Path, path: Key) -> int | None:
    try:
        return read_yaml(file).line(*path)
    except InputError:
        return None


def of_precision(written: WrittenConfig, read: ReadCommand, config: Configuration) -> Iterator[Finding]:
    """Yield a finding if the launcher changes the configured precision."""
    own = read.configurations[config.kind]
    for name in ("bf16", "fp16"):
        if config.values.get(name) and not own.values.get(name):
            message = f"{name} is false here, and accelerate makes it true by its mixed_precision: {name}."
            yield finding(written, Severity.SILENT, name, message)


def _dropped_text(written: WrittenConfig, key: str) -> str:
    script, program, parser = written.command.script, written.command.launcher or "python", written.command.parser
    handed = f"only `trl` passes {key} to accelerate"
    if script is None:
        return f"{key} has no effect: {handed}, and {_drops(written)} it."
    ends = f"{parser} ends the run at it, unless {script} takes it" if parser else ""
    return f"{key} does not set how {program} starts the training: {handed}. {ends or f'{script} may read it'}."


def _is_dropped(written: WrittenConfig, key: str) -> bool:
    """Return whether TRL's script ignores a key of the file that TRL lacks; only `trl` itself refuses such keys."""
    command = written.command
    of_file = key in written.values and key not in options_of(command.words)
    return of_file and command.source is None and command.launcher != TRL


def _drops(written: WrittenConfig) -> str:
    return f"TRL's script, which {written.command.launcher or 'python'} starts here, drops"


def refusal_finding(written: WrittenConfig, refusal: str) -> Finding:
    """Return the finding that TRL refuses the configuration, at the first key in TRL's message."""
    message = f"TRL refuses it: {_sentence(refusal)}{_counted_alone(written, refusal)}"
    return finding(written, Severity.ERROR, mentioned(written, refusal), message)


def _counted_alone(written: WrittenConfig, refusal: str) -> str:
    """Return the remedy if only the completions of all processes together make whole groups; else an empty text.

    ``trl`` reads the file before it starts the processes, so it counts the completions of one.
    """
    found = _GROUPS.search(refusal)
    if found is None or written.command.launcher != TRL or _BY_ALL in written.given:
        return ""
    try:
        processes = likely_processes(written)
    except InputError:
        return ""
    completions, copies = int(found[1]) * processes, int(found[2])
    if processes == 1 or completions % copies:
        return ""
    instead = f" in place of {_TOGETHER}" if _TOGETHER in written.given else ""
    return f" `trl` counts one process here: write {_BY_ALL}: {completions}{instead}, which counts all {processes}."


def of_error(written: WrittenConfig, error: InputError) -> Finding:
    """Return the finding for an error, at the first key in its message."""
    return finding(written, Severity.ERROR, mentioned(written, error.message), str(error))


def mentioned(written: WrittenConfig, text: str) -> str:
    """Return the first of the user's keys that a text mentions, or an empty text."""
    places = {name: re.search(rf"\b{re.escape(name)}\b", text) for name in written.given}
    found = {name: place.start() for name, place in places.items() if place is not None}
    return min(found, key=lambda name: found[name], default="")


def _deprecates_written_key(written: WrittenConfig, warning: str) -> bool:
    """Return whether a warning deprecates a key of a technique; every supported release still accepts these keys."""
    paths = {path for technique in find_trainer(written.trainer).techniques for path in technique.writes}
    return any(f"`{path.removeprefix('args.')}` is deprecated" in warning for path in paths)


def _of_warning(written: WrittenConfig, key: str, warning: str) -> Finding:
    # A deprecated field still works for now.
    severity = Severity.NOTE if "deprecated" in warning else Severity.SILENT
    return finding(written, severity, key, f"TRL warns: {_sentence(warning)}")


def _faults(written: WrittenConfig, read: ReadCommand) -> Iterator[Finding]:
    for fault in read.faults:
        own = fault.unknown and written.may_be_own(fault.key)
        old = None if own else legacy_of(written.trainer, fault.key, written.given.get(fault.key))
        if fault.unknown and _is_dropped(written, fault.key):
            what = old.sentence() if old is not None else _unknown(written, read, fault)
            yield finding(written, Severity.SILENT, fault.key, f"{what} {_drops(written)} it.")
        elif old is not None:
            yield finding(written, Severity.ERROR, fault.key, old.sentence())
        elif not fault.unknown:
            yield finding(written, Severity.ERROR, fault.key, f"{fault.key} {fault.message}.")
        elif written.command.takes_more:
            message = f"{fault.key} is not a key of TRL's: {written.command.script} may take it, which cannot be known."
            yield finding(written, Severity.NOTE, fault.key, f"{message}{_similar(fault, read)}")
        else:
            yield finding(written, Severity.ERROR, fault.key, _unknown(written, read, fault))


def _unknown(written: WrittenConfig, read: ReadCommand, fault: Fault) -> str:
    if fault.key in written.command.words:
        return f"{fault.key} is neither an option nor the value of one. A file is named by {CONFIG}."
    others = [item.name for item in trainers().values() if fault.key in item.fields and item.name != written.trainer]
    if others:
        return f"{fault.key} is a key of {', '.join(others)}, and not of {written.trainer}."
    none = f"{fault.key} is not a key of {written.trainer}, of the model, of the data, or of accelerate."
    return f"{none}{_similar(fault, read)}"


def _similar(fault: Fault, read: ReadCommand) -> str:
    near = difflib.get_close_matches(fault.key, read.names, n=2, cutoff=0.75)
    likeness = [difflib.SequenceMatcher(None, name, fault.key).ratio() for name in near]
    near = [name for name, ratio in zip(near, likeness, strict=True) if ratio > likeness[0] - _NEAR_AS_BEST]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _legacy(written: WrittenConfig, read: ReadCommand) -> Iterator[Finding]:
    """Yield keys that the installed classes accept but that were removed, are deprecated, or changed meaning."""
    wrong = {fault.key for fault in read.faults}
    for key, value in written.values.items():
        old = legacy_of(written.trainer, key, value) if key not in wrong else None
        if old is not None and not old.same:
            taken = Severity.SILENT if old.no_effect else Severity.NOTE
            # The parser accepts any text for a text field; the trainer fails later.
            fails = old.of_value and not old.accepted
            yield finding(written, Severity.ERROR if fails else taken, key, old.sentence())


def _silent(written: WrittenConfig, read: ReadCommand) -> Iterator[Finding]:
    yield from (_of_override(written, item) for item in read.overrides)
    for warning in read.warnings:
        if not _deprecates_written_key(written, warning):
            yield _of_warning(written, mentioned(written, warning), warning)
    if written.values.get(_REMOTE_CODE):
        message = "trust_remote_code lets the model's own code run in the training. This check runs none of it."
        yield finding(written, Severity.NOTE, _REMOTE_CODE, message)
    config = read.configurations.get(find_trainer(written.trainer).config_class)
    resumed = config.values.get(_RESUMED) if config is not None and written.command.source is None else None
    if config is not None and resumed:
        place = config.values["output_dir"] if resumed is True else resumed
        message = f"transformers ends a run that finds no checkpoint to resume from in {place}, such as a first one."
        yield finding(written, Severity.NOTE, _RESUMED, message)


def _of_override(written: WrittenConfig, item: Override) -> Finding:
    return finding(
        written, Severity.SILENT, item.key, f"{item.key} is {item.given!r} here, and TRL makes it {item.used!r}."
    )


def finding(written: WrittenConfig, severity: Severity, key: str, message: str) -> Finding:
    """Return a finding, with the line of its key if the file has it."""
    line = written.line(key) if key else None
    return Finding(severity, message, key, written.place if line is not None else "", line)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."
