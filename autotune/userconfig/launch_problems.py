"""Reports what the launch of a training ignores, changes or lacks: accelerate's file, ranks, precision, DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from autotune.core.configuration import Configuration, ReadCommand
from autotune.core.documents.verdict import Finding, Severity
from autotune.core.files.nested import mapping
from autotune.inspection.command_line import TRL
from autotune.trainers import find_trainer
from autotune.userconfig.deepspeed import deepspeed_document
from autotune.userconfig.fields import fields_of_kind
from autotune.userconfig.fsdp import own_name
from autotune.userconfig.launch import PROCESS_OPTIONS, RANK_VARIABLES, Launching
from autotune.userconfig.problems import finding, ignored_by, similar_to
from autotune.userconfig.written import WrittenConfig

# Keys of accelerate's file that a note quotes.
_QUOTED = ("distributed_type", "num_processes", "mixed_precision")
# Sections of that file, with the distributed_type for which accelerate reads them.
_SECTIONS: Mapping[str, str] = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP"}
_FP8 = "fp8"


def launch_findings(written: WrittenConfig, read: ReadCommand, started: Launching) -> Iterator[Finding]:
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
    several = not started.sets_processes and started.processes > 1
    if several or started.is_guessed:
        gpus, number = f"of {started.processes} GPUs", PROCESS_OPTIONS[launcher].format(started.processes)
        if not several:
            gpus, number = "GPU; one is assumed", f"{PROCESS_OPTIONS[launcher].format(8)} for eight"
        message = f"Nothing sets the number of processes, so {launcher} starts one on each {gpus}. Write {number}."
        yield Finding(Severity.NOTE, message)
    if started.ignored_processes:
        message = (
            f"accelerate starts one process instead of {started.ignored_processes}: only distributed_type MULTI_GPU,"
            " FSDP or DEEPSPEED in its file starts several."
        )
        yield finding(written, Severity.SILENT, "num_processes", message)
    yield from _unused(written, read, started)


def _unused(written: WrittenConfig, read: ReadCommand, started: Launching) -> Iterator[Finding]:
    """Yield the sections of accelerate's file, their keys, and the precision, that the training does not use."""
    for section, engine in _SECTIONS.items():
        if started.document.get(section) and started.document.get("distributed_type") != engine:
            message = f"{section} in accelerate's file has no effect without distributed_type: {engine}."
            yield Finding(Severity.SILENT, message)
            continue
        for key in mapping(started.document.get(section)):
            # accelerate adds the prefix where it is missing (accelerate 1.15, `_validate_launch_command`).
            name = f"fsdp_{own_name(key)}" if engine == "FSDP" else key
            if read.names and name not in read.names:
                message = f"{key} under {section} has no effect: accelerate reads no such key."
                yield Finding(Severity.SILENT, f"{message}{similar_to(name, read.names)}")
    own = read.configurations.get(find_trainer(written.trainer).config_class)
    trained = next((name for name in ("bf16", "fp16") if own is not None and own.values.get(name)), None)
    if started.precision == _FP8 and trained is not None:
        message = f"accelerate's mixed_precision: {_FP8} has no effect, since transformers trains with {trained}: true."
        yield finding(written, Severity.SILENT, "mixed_precision", message)


def mpi_findings(written: WrittenConfig, started: Launching, config: Configuration, *, here: bool) -> Iterator[Finding]:
    """Yield a finding if DeepSpeed finds no rank of a single process, and then looks for MPI (``mpi_discovery``).

    Args:
        here: whether the training is for this machine; another one may have mpi4py.
    """
    if not config.values.get("deepspeed") or started.is_ranked or (here and find_spec("mpi4py") is not None):
        return
    lacks = ", which this machine lacks" if here else ""
    message = (
        f"deepspeed of a process without a rank ends the run without mpi4py{lacks}. Start it with distributed_type:"
        f" DEEPSPEED in accelerate's file, by torchrun or by deepspeed, or set {', '.join(RANK_VARIABLES)}."
    )
    yield finding(written, Severity.ERROR if here else Severity.NOTE, "deepspeed", message)


def precision_findings(written: WrittenConfig, read: ReadCommand, config: Configuration) -> Iterator[Finding]:
    """Yield a finding if the launcher changes the configured precision."""
    own = read.configurations[config.kind]
    for name in ("bf16", "fp16"):
        if config.values.get(name) and not own.values.get(name):
            message = f"{name} is false here, and accelerate makes it true by its mixed_precision: {name}."
            yield finding(written, Severity.SILENT, name, message)


def deepspeed_findings(written: WrittenConfig, started: Launching, config: Configuration) -> Iterator[Finding]:
    """Yield the keys of DeepSpeed's document that it ignores; in its sections, it refuses unknown keys itself."""
    known = fields_of_kind("deepspeed", "read")
    for name in deepspeed_document(started.document, config) or ():
        # Names such as _comment and // are those of remarks.
        if name not in known and name[:1].isalpha():
            message = f"{name} in DeepSpeed's document has no effect: DeepSpeed reads no such key."
            yield finding(written, Severity.SILENT, "deepspeed", f"{message}{similar_to(name, sorted(known))}")


def _dropped_text(written: WrittenConfig, key: str) -> str:
    script, program, parser = written.command.script, written.command.launcher or "python", written.command.parser
    passed = f"only `trl` passes {key} to accelerate"
    if script is None:
        return f"{key} has no effect: {passed}, and {ignored_by(written)} it."
    fails = f"{parser} refuses it, unless {script} has such an argument" if parser else ""
    return f"{key} does not set how {program} starts the training: {passed}. {fails or f'{script} may read it'}."
