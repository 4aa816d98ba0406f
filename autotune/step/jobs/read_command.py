"""The job ``read_command``: reads a user's command with TRL's own parser and classes, and runs nothing."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, get_type_hints
from unittest import mock

from trl import DatasetMixtureConfig, ModelConfig, TrlParser

from autotune.confidential import PLACEHOLDER, hidden, hidden_values, is_secret, secrets_in
from autotune.core.configuration import Fault, Override, ReadCommand, configured
from autotune.core.protocol import ReadCommandRequest
from autotune.inspection.command_line import options_of
from autotune.step.fields import mismatch, plain, same, shown
from autotune.step.job import JobContext
from autotune.step.trainers import adapter
from autotune.trainers import find_trainer

# Keys of the file that TRL's parser takes out itself (trl/scripts/utils.py), or that trl resolves for accelerate.
_OUTSIDE_OF_CLASSES = frozenset({"env", "accelerate_config"})
_TEXT_TOO = frozenset({"lora_target_modules"})
"""Lists of ``trl.ModelConfig`` in whose place PEFT takes text: a regular expression, or a word for many modules."""
_BF16 = (8, 0)
_SCRIPT = "the script of TRL"


class _RefusedError(Exception):
    """TRL's parser ended; the message is what it would have printed."""


def read_command(request: ReadCommandRequest, _context: JobContext) -> ReadCommand:
    """Read the words of a command and the file that they name, as ``trl NAME`` would on the device of the request.

    The file's ``env`` is set in this process, as TRL's parser does. The file is read as it is, and what is secret in it
    stays in this process.
    """
    return _without_secrets(_found(request), secrets_in(dict(_file_of(request.words))))


def _without_secrets(found: ReadCommand, known: Collection[str]) -> ReadCommand:
    return dataclasses.replace(
        found,
        configurations={
            name: dataclasses.replace(item, values=hidden_values(item.values))
            for name, item in found.configurations.items()
        },
        faults=tuple(dataclasses.replace(fault, message=hidden(fault.message, known)) for fault in found.faults),
        overrides=tuple(
            dataclasses.replace(item, given=hidden_values(item.given), used=hidden_values(item.used))
            for item in found.overrides
            if not is_secret(item.key)
        ),
        launch=hidden_values(found.launch),
        refused=hidden(found.refused, known),
        warnings=tuple(hidden(warning, known) for warning in found.warnings),
    )


def _found(request: ReadCommandRequest) -> ReadCommand:
    from accelerate.commands.launch import launch_command_parser

    parser, launcher = _parser(request.trainer), launch_command_parser()
    parser.error = launcher.error = _refuse
    launch_names = {item.dest for item in launcher._actions if item.option_strings and item.dest != "help"}
    faults = tuple(_faults(parser, request.given, launch_names))
    names = tuple(sorted({*_dests(parser), *launch_names, *_OUTSIDE_OF_CLASSES}))
    unreadable = {fault.key for fault in faults}
    with _on(request), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            *objects, of_file, of_words = parser.parse_args_and_config(
                list(request.words), return_remaining_strings=True, separate_remaining_strings=True
            )
            faults += tuple(_unknown_words(launcher, of_words))
        except (_RefusedError, ValueError, TypeError, ImportError, OSError) as error:
            refusal = " ".join(str(error).split())
            return ReadCommand(faults=faults, names=names, refused=refusal or type(error).__name__)
    # A class may turn what it is given into what it takes, such as one loss into a list of one.
    faults = tuple(fault for fault in faults if fault.unknown or not _is_converted(fault.key, objects))
    given = {key: value for key, value in _typed(parser, request.words).items() if key not in unreadable}
    return ReadCommand(
        configurations={kind: configured(item, kind, plain) for item in objects for kind in (type(item).__name__,)},
        faults=faults,
        overrides=tuple(_overrides(objects, given)),
        launch=options_of([*of_file, *of_words]),
        names=names,
        warnings=tuple(
            dict.fromkeys(warning for warning in _own(caught) if any(f"`{key}`" in warning for key in given))
        ),
    )


def _parser(trainer: str) -> Any:
    if find_trainer(trainer).has_command:
        return importlib.import_module(f"trl.scripts.{trainer}").make_parser(prog=f"trl {trainer}")
    from trl.scripts.grpo import GRPOScriptArguments

    return TrlParser((GRPOScriptArguments, adapter(trainer).config, ModelConfig, DatasetMixtureConfig))


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


@contextmanager
def _on(request: ReadCommandRequest) -> Iterator[None]:
    """Let transformers answer for the GPU and the processes of the request, which need not be here."""
    import transformers.training_args as module

    ampere = request.device == "cuda" and (request.capability or _BF16) >= _BF16
    with (
        # Sizes of all processes together are shared out by it; no process group is needed for that.
        mock.patch.object(module.TrainingArguments, "world_size", property(lambda _: request.processes)),
        mock.patch.object(module, "is_torch_bf16_gpu_available", return_value=ampere),
        # TF32 is a mode of the process, which has no GPU; the class only has to accept it.
        mock.patch.object(module, "is_torch_tf32_available", return_value=ampere),
        mock.patch.object(module, "enable_tf32"),
    ):
        yield


def _typed(parser: Any, words: Sequence[str]) -> Mapping[str, Any]:
    """Return the user's values in the types of the fields, before the classes change any."""
    known = _dests(parser)
    given = {key: _converted(parser, key, value) for key, value in _file_of(words).items() if key in known}
    rest = [word for index, word in enumerate(words) if not _is_file(words, index)]
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
    return {**given, **vars(parser.parse_known_args(rest)[0])}


def _is_file(words: Sequence[str], index: int) -> bool:
    return words[index] == "--config" or (index > 0 and words[index - 1] == "--config")


def _file_of(words: Sequence[str]) -> Mapping[str, Any]:
    import yaml

    for index, word in enumerate(words[:-1]):
        if word == "--config":
            with open(words[index + 1], encoding="utf-8") as file:  # noqa: PTH123 (as TRL's parser opens it)
                return dict(yaml.safe_load(file))
    return {}


def _converted(parser: Any, key: str, value: Any) -> Any:
    """Return a default as argparse converts it: text by the field's type, anything else as it is."""
    action = next(item for item in parser._actions if item.dest == key)
    return parser._get_value(action, value) if isinstance(value, str) else value


def _dests(parser: Any) -> set[str]:
    return {action.dest for action in parser._actions if action.dest != "help"}


def _unknown_words(launcher: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[Fault]:
    """Yield those of the words that TRL's parser does not know that accelerate's does not know either.

    ``trl`` hands all of them to accelerate, which ends at an unknown option, and starts another word as the script.

    Args:
        launcher: accelerate's parser.

    Raises:
        _RefusedError: accelerate takes no such value.
    """
    launcher.add_argument("--accelerate_config")  # `trl` takes it out before
    rest = [*words, _SCRIPT]
    while rest:
        found, unknown = launcher.parse_known_args(rest)
        # Accelerate takes the first word that is no option for the script; behind an unknown option it is its value.
        options = [word.lstrip("-").partition("=")[0].replace("-", "_") for word in unknown if word.startswith("--")]
        script = [found.training_script] if found.training_script != _SCRIPT else []
        for key in options or script:
            yield _unknown(key)
        rest = found.training_script_args


def _unknown(key: str) -> Fault:
    return Fault(key, "is no key of this trainer", unknown=True)


def _faults(parser: Any, given: Mapping[str, Any], launch_names: Collection[str]) -> Iterator[Fault]:
    """Yield the problems of single keys; TRL's parser would end at the first of them, or miss them."""
    hints = {name: hint for kind in parser.dataclass_types for name, hint in get_type_hints(kind).items()}
    choices = {action.dest: action.choices for action in parser._actions}
    for key, value in given.items():
        if key in _OUTSIDE_OF_CLASSES or (key in launch_names and key not in hints):
            continue
        if key not in hints:
            yield _unknown(key)
            continue
        wanted = "" if key in _TEXT_TOO and isinstance(value, str) else mismatch(hints[key], value)
        listed = choices.get(key)
        if wanted:
            yield Fault(key, f"is {_shown(key, value)}, and takes {wanted}")
        elif listed and value is not None and value not in listed:
            yield Fault(key, f"is {_shown(key, value)}, and takes {', '.join(map(str, listed))}")


def _shown(key: str, value: object) -> str:
    return PLACEHOLDER if is_secret(key) else shown(hidden_values(value))


def _is_converted(key: str, objects: Sequence[Any]) -> bool:
    """Whether a class converted an unaccepted value into an accepted one."""
    for item in objects:
        if hasattr(item, key):
            return not mismatch(get_type_hints(type(item))[key], plain(getattr(item, key)))
    return False


def _overrides(objects: Sequence[Any], given: Mapping[str, Any]) -> Iterator[Override]:
    for item in objects:
        for name in (field.name for field in dataclasses.fields(item) if field.name in given):
            asked, used = plain(given[name]), plain(getattr(item, name, None))
            if not same(asked, used):
                yield Override(name, asked, used)


def _own(caught: Sequence[warnings.WarningMessage]) -> Iterator[str]:
    for item in caught:
        if any(part in item.filename for part in ("/trl/", "/transformers/")):
            yield " ".join(str(item.message).split())
