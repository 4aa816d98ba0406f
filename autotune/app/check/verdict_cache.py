"""Computes the cache keys of verdicts, and judges cached verdicts for another budget, without torch and TRL."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from autotune.app.arguments import CheckArguments
from autotune.app.check.need import needs_more
from autotune.app.planned import state_of
from autotune.core.documents.verdict import Outcome, Verdict, headline, outcome_for
from autotune.core.files.json_text import read_json
from autotune.core.machine import Machine
from autotune.core.workload import DatasetSource
from autotune.errors import InputError
from autotune.inspection.machine import environment
from autotune.inspection.paths import exists, is_file
from autotune.inspection.yaml_file import MAX_BYTES, parse_yaml
from autotune.planning.tracing.cache import fingerprint, package_digest
from autotune.trainers.distillation import TEACHER
from autotune.userconfig.bundle import DOCUMENTS
from autotune.userconfig.launch import READ_BY_ACCELERATE
from autotune.userconfig.launchers import TORCHRUN_VARIABLES
from autotune.userconfig.written import WrittenConfig

# Up to this size, a verdict's key includes a file's content; of larger files and directories, names, sizes and times.
_MAX_HASHED_BYTES = 1 << 20
# Options outside the key: a cached verdict is judged again for them.
_JUDGED_AGAIN = ("memory_budget", "when_unsure")
CACHED_OUTCOMES = (Outcome.FITS, Outcome.DOES_NOT_FIT, Outcome.TOO_CLOSE)
"""The outcomes to cache; others may change without a change of files or versions."""


def judged_for_budget(verdict: Verdict, budget_bytes: int, host_bytes: int | None = None) -> Verdict | None:
    """Return a cached verdict for another budget; None if it needs a check, such as a new remedy or further traces.

    Args:
        host_bytes: host memory of the device's machine; None if it is not known.
    """
    need = verdict.need
    if verdict.budget_bytes == budget_bytes or need is None:
        return verdict
    outcome = outcome_for(need, budget_bytes)
    if outcome is not Outcome.FITS or needs_more(need, budget_bytes):
        return None
    if need.memory is not None and need.memory.lacks_host(host_bytes):
        # Host memory is too small with any budget of the device.
        return None
    line = headline(outcome, need, budget_bytes, "")
    return replace(verdict, outcome=outcome, headline=line, budget_bytes=budget_bytes, remedy=None)


def key_of(args: CheckArguments, written: WrittenConfig, planned: Machine) -> str | None:
    """Return a hash of everything that a verdict depends on but the budget; None if a part is not on this machine.

    It includes every file named by a word of the command or a value of the configuration, and the files named in these
    documents, as accelerate's file names DeepSpeed's. It includes the directories of models and data, but no others,
    which may be large or written by a training.
    """
    # An imported module may depend on more than its own text.
    if args.probe or args.imports:
        return None
    local = _local_names(args, written)
    if not all(map(exists, local)):
        return None
    named = {str(file): _state(file) for file in (*map(Path, local), *_named_files(_words(args, written)))}
    text = written.file.text if written.file is not None else ""
    of_launchers = {
        name: value
        for name, value in os.environ.items()
        if name in TORCHRUN_VARIABLES or name.startswith(READ_BY_ACCELERATE)
    }
    folder = written.file.path.parent if written.file is not None else None
    bundle = [_state(folder / name) for name in DOCUMENTS] if folder is not None else None
    software = environment(planned)
    hardware = planned.hardware
    # A command may start a process on each of this machine's GPUs.
    device = planned.device.name, hardware.memory_bytes, hardware.processes
    settings = {name: value for name, value in args.settings.items() if name not in _JUDGED_AGAIN}
    return fingerprint("verdict", settings, text, named, bundle, device, software, of_launchers, package_digest())


def _words(args: CheckArguments, written: WrittenConfig) -> Iterator[str]:
    command = written.command
    yield from (*args.command, *command.launch, *command.words, command.script or "")
    yield from (str(args.model or ""), str(args.dataset or ""), str(written.default or ""))
    yield from (word.partition("=")[2] for word in (*args.command, *command.words) if word.startswith("--"))
    yield from _strings(written.values)


def _named_files(words: Iterable[str]) -> list[Path]:
    """Return the files that words name, directly or through the documents that they name.

    A relative path starts at the working directory, or at the folder of a document
    (:func:`autotune.userconfig.engine.engine_args`).
    """
    found: set[Path] = set()
    folders, names = {Path()}, set(words)
    while new := {folder / name for name in names for folder in folders if is_file(folder / name)} - found:
        found |= new
        for file in new:
            inside = _inside(file)
            names |= inside
            # Only a document's folder is a base of relative paths.
            folders |= {file.parent} if inside else set()
    return sorted(found)


def _inside(file: Path) -> frozenset[str]:
    """Return the strings in a JSON or YAML document; none for other files and files too large for a document."""
    try:
        text = file.read_text(encoding="utf-8") if file.stat().st_size <= MAX_BYTES else ""
    except (OSError, ValueError):
        return frozenset()
    with suppress(ValueError):
        return frozenset(_strings(read_json(text)))
    with suppress(InputError):
        return frozenset(_strings(parse_yaml(text, file).values))
    return frozenset()


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(item)


def _local_names(args: CheckArguments, written: WrittenConfig) -> list[str]:
    """Return the names of the models and the data: a verdict on remote ones is not cached."""
    given = written.given
    model, data = args.model or given.get("model_name_or_path"), args.dataset or given.get("dataset_name")
    items = given.get("datasets")
    entries = tuple(item for item in items if isinstance(item, dict)) if isinstance(items, list) else ()
    files = DatasetSource("", "", mixture=entries).places
    return [str(name) for name in (model, given.get(TEACHER), data, *(() if data else files)) if name]


def _state(path: Path) -> object:
    with suppress(OSError):  # it may not be readable
        if path.is_file() and path.stat().st_size <= _MAX_HASHED_BYTES:
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return state_of(str(path))
