"""Reports all problems of a configuration's keys at once, with their remedies."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from autotune.core.configuration import MIXTURE, MODEL_CONFIG, Built, Fault, ReadCommand
from autotune.core.documents.verdict import Finding, Severity
from autotune.core.files.nested import mapping
from autotune.core.plan import EPOCHS, STEPS
from autotune.errors import InputError
from autotune.inspection.command_line import CONFIG, TRL, options_of
from autotune.inspection.legacy import legacy_of
from autotune.inspection.yaml_file import excerpt
from autotune.trainers import find_trainer, trainers
from autotune.trainers.declared import LOADING
from autotune.trainers.distillation import TEACHER_LOADING
from autotune.trainers.prompts import NO_REWARD, PLACEHOLDER, check_reward_names
from autotune.userconfig.fields import fields_of_kind
from autotune.userconfig.fsdp import RENAMED, own_name
from autotune.userconfig.written import WrittenConfig

_ABSENT = ("ImportError", "ModuleNotFoundError", "PackageNotFoundError")
# The keys of rows that TRL ignores together with another one (trl 1.16, ``ScriptArguments`` and its scripts).
_IGNORED_BESIDE: Mapping[str, tuple[str, ...]] = {
    "datasets": ("dataset_name", "dataset_config", "dataset_streaming"),
    "dataset_name": ("streaming", "test_split_size"),
}
_REMOTE_CODE, _RESUMED = "trust_remote_code", "resume_from_checkpoint"
# Similarity of names such as per_device_batch_size and per_device_train_batch_size.
_NEAR_AS_BEST = 0.05
_TEXT_NUMBER = re.compile(r"\d+[eE][-+]?\d+")
"""A number without a point, which YAML 1.1 takes for text."""
_NO = re.compile(r"\bno\b")
_SWITCH = re.compile(r"argument --(bf16|tf32): expected one argument")
"""The error for an option that is no switch, since null is its default."""
_REWARDS = "reward_funcs"
_LOADING_FIELDS = (LOADING, TEACHER_LOADING)
"""Fields for mappings. TRL's classes also accept text there, but parse it only if it begins with a brace."""
# TrainingArguments._apply_legacy_fsdp_to_config (transformers 5.23)
_FSDP_WORDS = (
    "Words in fsdp are deprecated. Write fsdp: true, and in fsdp_config reshard_after_forward: true for full_shard or"
    " false for shard_grad_op, and cpu_offload: true for offload."
)
_QUANTISED = "quantization_config"
_OLDER_DTYPE = "torch_dtype"
"""transformers' older name of ``dtype``, which counts if that is null (``from_pretrained``, transformers 5.23)."""


def problems(written: WrittenConfig, read: ReadCommand, *, here: bool = True) -> tuple[Finding, ...]:
    """Return the problems and silent changes of a configuration, in the order of its file.

    Args:
        here: whether the training is for this machine; another one may have packages that this one lacks.
    """
    config = read.configurations.get(find_trainer(written.trainer).config_class)
    found = [*_faults(written, read), *_rewards(written, read), *_legacy(written, read), *_silent(written, read)]
    found += _quantised_twice(written, read)
    faulty = {fault.key for fault in read.faults}
    given = {name: value for name, value in written.given.items() if name not in faulty}
    wrong = {item.key for item in found if item.severity is Severity.ERROR}
    ended = {name: error for name, error in read.ended.items() if name not in wrong}
    found += value_findings(written, config.values if config is not None else given, ended)
    found += (
        finding(written, Severity.ERROR if here else Severity.NOTE, name, message)
        for name, message in read.absent.items()
    )
    absent = read.refused.startswith(_ABSENT) and not here
    if read.refused and not absent and not _follows(written, read.refused, found):
        found.append(refusal_finding(written, read.refused))
    last = 1 << 30
    return tuple(sorted(found, key=lambda item: item.line or last))


def value_findings(written: WrittenConfig, values: Mapping[str, object], ended: Mapping[str, str]) -> Iterator[Finding]:
    """Yield values that TRL's class accepts but that later end the training, or have no effect, or leave few steps.

    Args:
        values: values of the trainer's configuration.
        ended: by argument that ends a training of a tiny model, the error.
    """
    for name, error in ended.items():
        is_text = any(map(_TEXT_NUMBER.fullmatch, map(str, mapping(values.get(name)).values())))
        hint = " YAML takes a number such as 1e-6 for text: write 1.0e-6." if is_text else ""
        message = f"{name} makes training fail: {_sentence(error)}{hint}{_remedy(written, error)}"
        yield finding(written, Severity.ERROR, name, message)
    for name in _LOADING_FIELDS:
        given = values.get(name)
        if isinstance(given, str) and given and not given.startswith("{"):
            yield finding(written, Severity.ERROR, name, f"{name} is text, and TRL needs a mapping.")
    loading = mapping(values.get(LOADING))
    if loading.get(_OLDER_DTYPE) is not None and loading.get("dtype", "float32") is not None:
        dtype = str(loading[_OLDER_DTYPE]).removeprefix("torch.")
        message = f"{_OLDER_DTYPE} in {LOADING} has no effect, since TRL also passes dtype. Write dtype: {dtype}."
        yield finding(written, Severity.SILENT, LOADING, message)
    if values.get("fsdp"):
        yield from _unread_of_fsdp(written, mapping(values.get("fsdp_config")))
    # Trainer.set_initial_training_values, and DefaultFlowCallback.on_step_end
    steps, epochs = values.get(STEPS), values.get(EPOCHS)
    if steps == 0:
        message = f"{STEPS} is 0: training stops after the first step. Write {STEPS}: -1 to train {EPOCHS}."
        yield finding(written, Severity.SILENT, STEPS, message)
    elif isinstance(steps, int) and steps < 0 and isinstance(epochs, (int, float)) and epochs <= 0:
        message = f"{EPOCHS} is {epochs:g}: training stops before the first step."
        yield finding(written, Severity.SILENT, EPOCHS, message)


def _unread_of_fsdp(written: WrittenConfig, given: Mapping[str, object]) -> Iterator[Finding]:
    """Yield the keys of the trainer's own ``fsdp_config`` that transformers does not read for FSDP2."""
    keys = {own_name(name): value for name, value in given.items()}
    unread = [] if str(keys.get("version", 2)) != "2" else sorted(keys.keys() - fields_of_kind("fsdp", "read"))
    for name in unread:
        instead = f" Write {RENAMED[name]}." if name in RENAMED else ""
        message = f"{name} in fsdp_config has no effect: transformers reads no such key for FSDP2.{instead}"
        yield finding(written, Severity.SILENT, "fsdp_config", message)


def build_findings(written: WrittenConfig, built: Built, known: Sequence[Finding], *, here: bool) -> Iterator[Finding]:
    """Yield the errors and warnings of the trainer's construction, unless they were already reported.

    Only messages that mention a key of the user are reported, since traces set some arguments themselves. A refusal
    that mentions none counts as reported if there is any other error: autotune's rules of trainers mirror TRL's.

    Args:
        here: whether the training is for this machine; another one may have packages that this one lacks.
    """
    reported = {item.key for item in known if item.severity is not Severity.NOTE}
    if built.refused.startswith(_ABSENT) and not here:
        message = f"On this machine it cannot be built: {_sentence(built.refused)}"
        yield finding(written, Severity.NOTE, mentioned(written, built.refused), message)
    elif built.refused and not _follows(written, built.refused, known):
        yield refusal_finding(written, built.refused)
    for warning in built.warnings:
        key = mentioned(written, warning)
        new = _of_warning(written, key, warning)
        if key and not (key in reported or _deprecates_written_key(written, warning) or new in known):
            reported.add(key)
            yield new


def _is_dropped(written: WrittenConfig, key: str) -> bool:
    """Return whether TRL's script ignores a key of the file that TRL lacks; only `trl` itself refuses such keys."""
    command = written.command
    of_file = key in written.values and key not in options_of(command.words)
    return of_file and command.source is None and command.launcher != TRL


def ignored_by(written: WrittenConfig) -> str:
    """Return the clause that TRL's script ignores a key, up to the verb."""
    return f"TRL's script, which {written.command.launcher or 'python'} starts here, ignores"


def _follows(written: WrittenConfig, refusal: str, known: Iterable[Finding]) -> bool:
    """Return whether a refusal may follow from a known error: it mentions the same key, or no key of the user."""
    wrong, key = {item.key for item in known if item.severity is Severity.ERROR}, mentioned(written, refusal)
    return key in wrong or (bool(wrong) and not key)


def refusal_finding(written: WrittenConfig, refusal: str) -> Finding:
    """Return the finding that TRL refuses the configuration, at the first key in TRL's message."""
    message = f"TRL refuses it: {_sentence(refusal)}{_remedy(written, refusal)}"
    return finding(written, Severity.ERROR, mentioned(written, refusal), message)


def _remedy(written: WrittenConfig, error: str) -> str:
    """Return a sentence on what to write for some of TRL's errors, or an empty text."""
    switch, trainer = _SWITCH.search(error), find_trainer(written.trainer)
    if switch is not None:
        return f" Write --{switch[1]} true."
    # TRL 1.16, `TrainingCommand.run`
    if written.command.launcher != TRL or not trainer.generates or "divisible" not in error:
        return ""
    start = f"accelerate launch -m trl.scripts.{trainer.name} {CONFIG} FILE"
    return f" `trl` reads its file in one process before it starts several; `{start}` counts all of them."


def error_finding(written: WrittenConfig, error: InputError) -> Finding:
    """Return the finding for an error, at the first key in its message."""
    return finding(written, Severity.ERROR, mentioned(written, error.message), str(error))


def mentioned(written: WrittenConfig, text: str) -> str:
    """Return the first of the user's keys that a text mentions, or an empty text."""
    places = {name: re.search(rf"\b{re.escape(name)}\b", text) for name in written.given}
    found = {name: place.start() for name, place in places.items() if place is not None}
    return min(found, key=lambda name: found[name], default="")


def _deprecates_written_key(written: WrittenConfig, warning: str) -> bool:
    """Return whether a warning deprecates a key of a technique; every supported release still accepts these keys."""
    names = "|".join(map(re.escape, _technique_keys(written)))
    return re.search(rf"`({names})(=\w+)?` is deprecated", warning) is not None


def _technique_keys(written: WrittenConfig) -> set[str]:
    techniques = find_trainer(written.trainer).techniques
    return {path.removeprefix("args.") for technique in techniques for path in technique.writes}


def _of_warning(written: WrittenConfig, key: str, warning: str) -> Finding:
    # A deprecated field still works for now.
    severity = Severity.NOTE if "deprecated" in warning else Severity.SILENT
    return finding(written, severity, key, f"TRL warns: {_sentence(warning)}")


def _faults(written: WrittenConfig, read: ReadCommand) -> Iterator[Finding]:
    for fault in read.faults:
        own = fault.unknown and written.may_be_own(fault.key)
        old = None if own else legacy_of(written.trainer, fault.key, written.given.get(fault.key))
        may_be_taken = fault.unknown and written.command.takes_more and (old is None or old.never)
        if fault.unknown and _is_dropped(written, fault.key):
            what = old.sentence() if old is not None else _unknown(written, read, fault)
            yield finding(written, Severity.SILENT, fault.key, f"{what} {ignored_by(written)} it.")
        elif may_be_taken:
            message = f"{fault.key} is not a key of TRL. Check that {written.command.script} has such an argument."
            advice = f" {old.sentence()}" if old is not None else similar_to(fault.key, read.names)
            yield finding(written, Severity.NOTE, fault.key, f"{message}{advice}")
        elif old is not None:
            yield finding(written, Severity.ERROR, fault.key, old.sentence())
        elif not fault.unknown:
            is_no = written.given.get(fault.key) is False and _NO.search(fault.message) is not None
            hint = " YAML reads no without quotes as false: write 'no'." if is_no else ""
            yield finding(written, Severity.ERROR, fault.key, f"{fault.key} {fault.message}.{hint}")
        else:
            yield finding(written, Severity.ERROR, fault.key, _unknown(written, read, fault))


def _rewards(written: WrittenConfig, read: ReadCommand) -> Iterator[Finding]:
    """Yield the placeholder reward, and names that TRL's own command does not find; a script may have its own."""
    named = read.script.get(_REWARDS, written.given.get(_REWARDS))
    if isinstance(named, list) and set(map(str, named)) == {NO_REWARD}:
        yield finding(written, Severity.NOTE, _REWARDS, f"{PLACEHOLDER}.")
    if written.own_command and isinstance(named, list):
        try:
            check_reward_names(map(str, named))
        except InputError as error:
            yield error_finding(written, error)


def _unknown(written: WrittenConfig, read: ReadCommand, fault: Fault) -> str:
    if fault.key in written.command.words:
        return f"{fault.key} is neither an option nor the value of one. A file is named by {CONFIG}."
    others = [item.name for item in trainers().values() if fault.key in item.fields and item.name != written.trainer]
    if others:
        return f"{fault.key} is a key of {', '.join(others)}, and not of {written.trainer}."
    none = f"{fault.key} is not a key of {written.trainer}, of the model, of the data, or of accelerate."
    return f"{none}{similar_to(fault.key, read.names)}"


def similar_to(key: str, names: Sequence[str]) -> str:
    """Return a question with the most similar of some names, or an empty text."""
    near = difflib.get_close_matches(key, names, n=2, cutoff=0.75)
    likeness = [difflib.SequenceMatcher(None, name, key).ratio() for name in near]
    near = [name for name, ratio in zip(near, likeness, strict=True) if ratio > likeness[0] - _NEAR_AS_BEST]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _legacy(written: WrittenConfig, read: ReadCommand) -> Iterator[Finding]:
    """Yield keys that the installed classes accept but that were removed, are deprecated, or changed meaning."""
    wrong, ours = {fault.key for fault in read.faults}, _technique_keys(written)
    for key, value in written.values.items():
        old = legacy_of(written.trainer, key, value) if key not in wrong else None
        # autotune itself writes a key that is deprecated without an equivalent, as it measured it.
        if old is not None and not old.same and not (key in ours and old.accepted and old.by_hand):
            taken = Severity.SILENT if old.no_effect else Severity.NOTE
            # The parser accepts any text for a text field; the trainer fails later.
            fails = old.of_value and not old.accepted
            yield finding(written, Severity.ERROR if fails else taken, key, old.sentence())


def _quantised_twice(written: WrittenConfig, read: ReadCommand) -> Iterator[Finding]:
    """Yield an error if a model is quantised by two keys, of which TRL's own command passes both to its trainer."""
    config = read.configurations.get(find_trainer(written.trainer).config_class)
    model = read.configurations.get(MODEL_CONFIG)
    if not written.own_command or config is None or model is None or _QUANTISED not in config.keys(LOADING):
        return
    for name in ("load_in_4bit", "load_in_8bit"):
        if model.values.get(name):
            message = f"TRL refuses {_QUANTISED} in {LOADING} beside {name}: true. Leave one of them out."
            yield finding(written, Severity.ERROR, name, message)


def _silent(written: WrittenConfig, read: ReadCommand) -> Iterator[Finding]:
    for last, first in written.file.root.repeated_keys() if written.file is not None else ():
        message = f"{excerpt(str(last.key))} is there twice: line {first.line} has it too, and has no effect."
        yield Finding(Severity.SILENT, message, str(last.key), written.place, last.line)
    for item in read.overrides:
        message = f"{item.key} is {item.given!r} here, and TRL makes it {item.used!r}."
        words = item.key == "fsdp" and item.used is True
        severity = Severity.NOTE if words else Severity.SILENT
        yield finding(written, severity, item.key, _FSDP_WORDS if words else message)
    for warning in read.warnings:
        if not _deprecates_written_key(written, warning):
            yield _of_warning(written, mentioned(written, warning), warning)
    mixture = read.configurations.get(MIXTURE)
    used = "datasets" if mixture is not None and mixture.values.get("datasets") else "dataset_name"
    for key in _IGNORED_BESIDE[used]:
        if written.given.get(used) and written.given.get(key):
            yield finding(written, Severity.SILENT, key, f"{key} has no effect together with {used}.")
    if written.values.get(_REMOTE_CODE):
        message = "trust_remote_code lets the model's own code run in the training. This check runs none of it."
        yield finding(written, Severity.NOTE, _REMOTE_CODE, message)
    config = read.configurations.get(find_trainer(written.trainer).config_class)
    resumed = config.values.get(_RESUMED) if config is not None and written.command.source is None else None
    if config is not None and resumed:
        place = config.values["output_dir"] if resumed is True else resumed
        message = f"A run without a checkpoint in {place}, such as the first run, fails: there is nothing to resume."
        yield finding(written, Severity.NOTE, _RESUMED, message)


def finding(written: WrittenConfig, severity: Severity, key: str, message: str) -> Finding:
    """Return a finding, with the line of its key if the file has it."""
    line = written.line(key) if key else None
    return Finding(severity, message, key, written.place if line is not None else "", line)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."
