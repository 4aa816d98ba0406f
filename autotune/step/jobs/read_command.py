"""The job ``read_command``: parses a user's command with TRL's own parser and classes; trains nothing."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

from transformers import Trainer, TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from trl import DatasetMixtureConfig, ModelConfig, TrlParser

from autotune.confidential import PLACEHOLDER, hidden_values, is_secret, secrets_in
from autotune.core.configuration import TRACKERS, Fault, Launched, ReadCommand, read_object
from autotune.core.files.codec import decode, encode
from autotune.core.gpu import AMPERE
from autotune.core.jobs.protocol import ReadCommandRequest
from autotune.errors import one_line
from autotune.inspection.command_line import ACCELERATE, TRL, options_of, split_config
from autotune.step.fields import excerpt, mismatch, overrides, plain
from autotune.step.job import JobContext
from autotune.step.jobs.accelerate_launch import SCRIPT, RefusedError, launch_parser, read_launch, refuse
from autotune.step.trainers import find_adapter
from autotune.trainers import find_trainer

# Keys of the file that are no fields: TRL's parser (trl/scripts/utils.py) or its command line consumes them.
_PARSER_KEYS = frozenset({"env", "accelerate_config"})
_FURTHER_TYPES: Mapping[str, tuple[type, ...]] = {"lora_target_modules": (str,), "beta": (int, float)}
"""Types accepted in place of a list: PEFT accepts text for many modules, and OnlineDPOConfig a number."""
_MESSAGE_ERRORS = (RefusedError, ValueError, TypeError, OSError)
_BARE_ERRORS = (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError)
"""Exceptions of TRL's classes that are unclear without their type, such as a division by ``num_generations: 0``."""
_UNLISTED_TRACKERS = frozenset({"azure_ml", "flyte"})
"""Trackers that ``get_available_reporting_integrations`` may omit although they are installed."""
_ACCELERATE_CONFIG = "accelerate_config"
_SCRIPT_OF_VALUE = "cannot be in the file: `trl` passes its value on as a word, which accelerate takes for the script"
_READ_ONCE = (
    "is read once, as `--accelerate_config NAME` in two words or as a key of the file: accelerate fails on another"
)


def read_command(request: ReadCommandRequest, _context: JobContext) -> ReadCommand:
    """Parse the words of a command and its file, as ``trl NAME`` would on the request's device.

    TRL's parser sets the file's ``env`` in this process. Secrets in the file do not leave this process.
    """
    return _without_secrets(_parse_command(request), secrets_in(dict(_file_values(split_config(request.words)[0]))))


def _without_secrets(reply: ReadCommand, secrets: Collection[str]) -> ReadCommand:
    overrides = tuple(item for item in reply.overrides if not is_secret(item.key))
    document = encode(dataclasses.replace(reply, overrides=overrides))
    # A secret may be a word that is also a part of a key's name.
    return dataclasses.replace(decode(ReadCommand, hidden_values(document, secrets)), names=reply.names)


def _parse_command(request: ReadCommandRequest) -> ReadCommand:
    if request.launcher != ACCELERATE:
        return _parse(request, starts_accelerate=request.launcher == TRL)
    start = read_launch(request.launch, request.gpus, request.default_file)
    if start.refused:
        return ReadCommand(launched=start)
    return _parse_in_ranks(request, start)


def _parse_in_ranks(request: ReadCommandRequest, start: Launched) -> ReadCommand:
    """Parse a command as each process that accelerate starts does."""
    result = _parse(dataclasses.replace(request, processes=start.processes), starts_accelerate=False)
    return dataclasses.replace(result, launched=start)


def _parse(request: ReadCommandRequest, *, starts_accelerate: bool) -> ReadCommand:
    """Parse a command with TRL's parser.

    Args:
        starts_accelerate: whether the command starts accelerate, as ``trl`` does.
    """
    parser, launcher = _parser(request.trainer), launch_parser()
    parser.error, parser.allow_abbrev = refuse, _destinations(parser).issuperset(request.own)
    switches = {item.dest: item.nargs == 0 for item in launcher._actions if item.option_strings and item.dest != "help"}
    forwards = request.launcher == TRL
    faults = tuple(_faults(parser, request.given, switches, forwards=forwards))
    names = tuple(sorted({*_destinations(parser), *switches, *_PARSER_KEYS}))
    # Keys of a file may have hyphens in place of underscores.
    unreadable = {fault.key.replace("-", "_") for fault in faults}
    with _emulated_machine(request), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            *objects, of_file, of_words = parser.parse_args_and_config(
                list(request.words), return_remaining_strings=True, separate_remaining_strings=True
            )
            forwarded = _resolve_accelerate_config([*of_file, *of_words]) if forwards else of_words
            unknown = (fault for fault in _unknown_options(launcher, forwarded) if fault.key not in unreadable)
            faults += () if unreadable & switches.keys() else tuple(unknown)
        except (*_MESSAGE_ERRORS, *_BARE_ERRORS) as error:
            refusal, kind = one_line(error), type(error).__name__
            refusal = refusal or kind if isinstance(error, _MESSAGE_ERRORS) else f"{kind}: {refusal}"
            words = options_of(split_config(request.words)[1]).keys() - unreadable
            faults += tuple(map(_unknown, sorted(filter(_without(parser, launcher), words))))
            return ReadCommand(faults=faults, names=names, refused=refusal)
    # A class may convert a value, such as one loss into a list of one.
    faults = tuple(fault for fault in faults if fault.unknown or not _is_converted(fault.key, objects))
    start = read_launch(forwarded, request.gpus, request.default_file) if starts_accelerate and not faults else None
    if start is not None and start.processes != request.processes:
        return _parse_in_ranks(request, start)
    used = {field.name: getattr(item, field.name, None) for item in objects for field in dataclasses.fields(item)}
    unset = {field.name for item in objects for field in dataclasses.fields(item) if field.default is None}
    given = {key: value for key, value in _given_values(parser, request.words).items() if key not in unreadable}
    return ReadCommand(
        configurations={kind: read_object(item, kind, plain) for item in objects for kind in (type(item).__name__,)},
        faults=faults,
        overrides=tuple(overrides(given, used, unset)),
        launch=options_of([*of_file, *of_words]),
        launched=start,
        names=names,
        warnings=tuple(
            dict.fromkeys(warning for warning in _warning_texts(caught) if any(f"`{key}`" in warning for key in given))
        ),
        absent=dict(_missing_packages(next(item for item in objects if isinstance(item, TrainingArguments)))),
    )


def _parser(trainer: str) -> Any:
    if find_trainer(trainer).has_command:
        return importlib.import_module(f"trl.scripts.{trainer}").make_parser(prog=f"trl {trainer}")
    from trl.scripts.grpo import GRPOScriptArguments

    return TrlParser((GRPOScriptArguments, find_adapter(trainer).config, ModelConfig, DatasetMixtureConfig))


@contextmanager
def _emulated_machine(request: ReadCommandRequest) -> Iterator[None]:
    """Patch transformers to detect the GPU and the processes of the request, present or not."""
    import transformers.training_args as module

    on_gpu = request.device == "cuda"
    ampere = on_gpu and (request.capability or AMPERE) >= AMPERE
    with (
        # The classes divide total sizes by it; there is no process group.
        mock.patch.object(module.TrainingArguments, "world_size", property(lambda _: request.processes)),
        # GPUs older than Ampere emulate bfloat16 in float32 (``torch.cuda.is_bf16_supported``).
        mock.patch.object(module, "is_torch_bf16_gpu_available", return_value=on_gpu),
        # TF32 is a mode of the process, which has no GPU; the class only has to accept it.
        mock.patch.object(module, "is_torch_tf32_available", return_value=ampere),
        mock.patch.object(module, "enable_tf32"),
    ):
        yield


def _missing_packages(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    """Yield each argument that needs a package that is not installed, with a sentence about it."""
    named = set(args.report_to) - _UNLISTED_TRACKERS
    trackers = sorted(named - set(get_available_reporting_integrations())) if named else []
    if trackers:
        yield (
            TRACKERS,
            f"{TRACKERS} names {', '.join(trackers)}: TRL refuses that where it is not installed, as here.",
        )
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except (ImportError, ValueError) as error:
        # Some optimizers need the model, which is not known yet.
        if any(word in str(error) for word in ("install", "import")):
            yield "optim", f"TRL refuses optim={plain(args.optim)} here: {one_line(error).rstrip('.')}."


def _given_values(parser: Any, words: Sequence[str]) -> Mapping[str, Any]:
    """Return the user's values converted to the fields' types, before the classes' ``__post_init__``."""
    destinations, (file, rest) = _destinations(parser), split_config(words)
    given = {key: _converted(parser, key, value) for key, value in _file_values(file).items() if key in destinations}
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
    return {**given, **vars(parser.parse_known_args(rest)[0])}


def _file_values(file: str | None) -> Mapping[str, Any]:
    import yaml

    return dict(yaml.safe_load(Path(file).read_text(encoding="utf-8"))) if file is not None else {}


def _converted(parser: Any, key: str, value: Any) -> Any:
    """Convert text to the field's type as argparse does; return other values unchanged."""
    action = next(item for item in parser._actions if item.dest == key)
    return parser._get_value(action, value) if isinstance(value, str) else value


def _destinations(parser: Any) -> set[str]:
    return {action.dest for action in parser._actions if action.dest != "help"}


def _resolve_accelerate_config(words: list[str]) -> list[str]:
    """Replace ``--accelerate_config`` by accelerate's option, as ``trl`` does before it calls accelerate.

    Raises:
        RefusedError: there is no such file.
    """
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    try:
        resolved: list[str] = resolve_accelerate_config_argument(words)
    except ValueError as error:
        refuse(f"{_ACCELERATE_CONFIG}: {error}")
    return resolved


def _unknown_options(launcher: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[Fault]:
    """Yield a fault for each option that neither TRL's nor accelerate's parser has.

    ``trl`` passes all of them to accelerate, which fails on an unknown option, and treats any other word as the script.

    Args:
        launcher: accelerate's parser.

    Raises:
        RefusedError: accelerate does not accept a value.
    """
    rest = [*words, SCRIPT]
    while rest:
        parsed, unknown = launcher.parse_known_args(rest)
        # accelerate treats the first word that is not an option as the script; after an unknown option it is its value.
        options = [word.lstrip("-").partition("=")[0].replace("-", "_") for word in unknown if word.startswith("--")]
        script = [parsed.training_script] if parsed.training_script != SCRIPT else []
        for key in options or script:
            yield Fault(key, _READ_ONCE) if key == _ACCELERATE_CONFIG else _unknown(key)
        rest = parsed.training_script_args


def _without(*parsers: argparse.ArgumentParser) -> Callable[[str], bool]:
    """Return whether parsers have no option of a name, nor one that begins with it."""
    options = {
        word.lstrip("-").replace("-", "_") for each in parsers for item in each._actions for word in item.option_strings
    }
    return lambda name: not any(option.startswith(name) for option in options | _PARSER_KEYS)


def _unknown(key: str) -> Fault:
    return Fault(key, "is not a key of this trainer", unknown=True)


def _faults(parser: Any, given: Mapping[str, Any], switches: Mapping[str, bool], *, forwards: bool) -> Iterator[Fault]:
    """Yield the problems of single keys; TRL's parser would end at the first one, or miss it.

    Args:
        switches: options of accelerate's parser, with whether they take no value.
        forwards: whether ``trl`` passes such keys to accelerate.
    """
    hints = {name: hint for kind in parser.dataclass_types for name, hint in get_type_hints(kind).items()}
    choices = {action.dest: action.choices for action in parser._actions}
    for key, value in given.items():
        if key in _PARSER_KEYS or (key in switches and key not in hints):
            if forwards and switches.get(key):
                yield Fault(key, f"{_SCRIPT_OF_VALUE}: give --{key} in the command, or accelerate_config in its place")
            continue
        if key not in hints:
            yield _unknown(key)
            continue
        accepted = "" if type(value) in _FURTHER_TYPES.get(key, ()) else mismatch(hints[key], value)
        allowed = choices.get(key)
        if accepted:
            yield Fault(key, f"is {_excerpt(key, value)}, and takes {accepted}")
        elif allowed and value is not None and value not in allowed:
            yield Fault(key, f"is {_excerpt(key, value)}, and takes {', '.join(map(str, allowed))}")


def _excerpt(key: str, value: object) -> str:
    return PLACEHOLDER if is_secret(key) else excerpt(hidden_values(value))


def _is_converted(key: str, objects: Sequence[Any]) -> bool:
    """Whether a class converted an unaccepted value into an accepted one."""
    for item in objects:
        if hasattr(item, key):
            return not mismatch(get_type_hints(type(item))[key], plain(getattr(item, key)))
    return False


def _warning_texts(caught: Sequence[warnings.WarningMessage]) -> Iterator[str]:
    for item in caught:
        if any(part in item.filename for part in ("/trl/", "/transformers/")):
            yield " ".join(str(item.message).split())
