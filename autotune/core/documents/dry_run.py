"""The result of ``autotune dry-run``: the memory of each process on its null GPU, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.core.documents.short_repr import ShortRepr


class DryOutcome(StrEnum):
    """The answer of a dry run.

    ``FITS``: all steps ran, and every batch had the largest rows. ``BATCHES_FIT``: all steps ran, but a later batch may
    be larger. ``DOES_NOT_FIT``: memory of a GPU ran out. ``UNKNOWN``: the command ended earlier, or used a function
    that null GPUs do not support. ``CANNOT_RUN``: the command failed before it used a GPU.
    """

    FITS = "fits"
    BATCHES_FIT = "fits the batches that ran"
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "not known"
    CANNOT_RUN = "cannot run"


EXIT_CODES: Mapping[DryOutcome, int] = {
    DryOutcome.FITS: 0,
    DryOutcome.DOES_NOT_FIT: 1,
    DryOutcome.CANNOT_RUN: 2,
    DryOutcome.BATCHES_FIT: 3,
    DryOutcome.UNKNOWN: 3,
}
"""The exit code of ``autotune dry-run`` for each outcome."""


@dataclass(frozen=True)
class SourceLine:
    """A line of source code.

    Attributes:
        file, line, function: of the deepest call in the user's own files; empty if none of them was running.
        text: the source line.
        within: the deepest line of a library below it, except torch, such as ``trl/trainer/utils.py:12, in pad``.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    text: str = ""
    within: str = ""


@dataclass(frozen=True)
class StepMemory:
    """The memory of one GPU in one process, at its peak within one step.

    Attributes:
        step: the optimizer step, from 1, with the batches before it; 0: before the first batch.
        device: index of the GPU as the process sees it.
        card: the GPU's identifier.
        allocated_bytes, reserved_bytes: peaks of PyTorch's allocator.
        non_pytorch_bytes: other memory in use on the GPU at the end of the step: CUDA's context, other libraries, other
            processes.
        total_bytes: memory that CUDA can allocate.
    """

    step: int
    device: int
    card: str
    allocated_bytes: int
    reserved_bytes: int
    non_pytorch_bytes: int
    total_bytes: int

    @property
    def used_bytes(self) -> int:
        """Peak memory in use on the GPU, in total."""
        return self.reserved_bytes + self.non_pytorch_bytes


@dataclass(frozen=True)
class Loader:
    """A ``DataLoader`` that the script iterated over.

    Attributes:
        order: ``largest first``, ``as shuffled`` if requested, or ``as it is`` for ``reason``.
        field, unit: of the measured row sizes.
        rows: number of rows; 0 if they were not measured.
        largest: size of the largest row.
    """

    order: str
    reason: str = ""
    field: str = ""
    unit: str = ""
    rows: int = 0
    largest: int = 0

    @property
    def ordered(self) -> bool:
        """Whether every batch had the largest rows."""
        return self.order == "largest first"


@dataclass(frozen=True)
class FailedAllocation:
    """A failed allocation of GPU memory, whether the script handled it or not.

    Attributes:
        step: the current step.
        allocated_bytes, reserved_bytes: of PyTorch's allocator.
        free_bytes: free memory of the GPU.
    """

    step: int
    device: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    place: SourceLine


@dataclass(frozen=True)
class ScriptError:
    """An exception that ended a process.

    Attributes:
        kind: its class.
        out_of_memory: whether it, or one of its causes, is an out-of-memory error.
    """

    kind: str
    message: str
    out_of_memory: bool
    place: SourceLine


@dataclass(frozen=True)
class ProcessRecord:
    """A process of the command in which PyTorch was loaded.

    Attributes:
        rank: its rank.
        local_ranks: number of ranks that the launcher started on this machine.
        uses_cuda: whether it used a GPU.
        ended: ``stopped`` after the last step, ``finished`` by itself, ``error``; empty if it was killed.
        steps: number of optimizer steps that ran.
    """

    pid: int
    rank: int
    local_ranks: int
    uses_cuda: bool
    ended: str
    steps: int = 0
    spans: tuple[StepMemory, ...] = ()
    loaders: tuple[Loader, ...] = ()
    failed_allocations: tuple[FailedAllocation, ...] = ()
    error: ScriptError | None = None


@dataclass(frozen=True)
class UnsupportedCall:
    """A CUDA function that a null GPU does not support: its name and its purpose."""

    function: str
    belongs_to: str


@dataclass(frozen=True)
class CommandExit:
    """How the command ended.

    Attributes:
        code: its exit code; None if it was killed.
        signal: the signal that killed it, or None.
        timed_out: whether the time limit ended it.
    """

    code: int | None
    signal: int | None = None
    timed_out: bool = False


@dataclass(frozen=True, repr=False)
class DryRun(ShortRepr):
    """The result of a dry run. Encoded by ``core.codec``, this is the document of ``autotune dry-run --json``.

    Attributes:
        headline: the answer in one line.
        reason: the reason for the answer, if the figures do not show it; else empty.
        command: its words, with secrets masked.
        gpu: name of the null GPUs; ``gpus`` is their number, and ``total_bytes`` what CUDA can allocate on each.
        steps: number of requested optimizer steps.
        used_bytes: peak memory in use on a GPU; if memory ran out, with the failed request. None: nothing was used.
        spare_bytes: free memory left; if memory ran out, minus the missing bytes.
        failed: the failed allocation that ended the command; None without one.
        processes: those that used a GPU, by rank.
        refused: functions of the script that null GPUs do not support.
        notes: limitations of the result, in sentences.
    """

    schema: int = field(default=1, kw_only=True)
    outcome: DryOutcome
    headline: str
    reason: str
    command: tuple[str, ...]
    gpu: str
    gpus: int
    total_bytes: int
    steps: int
    used_bytes: int | None
    spare_bytes: int | None
    failed: FailedAllocation | None
    processes: tuple[ProcessRecord, ...]
    refused: tuple[UnsupportedCall, ...]
    notes: tuple[str, ...]
    ending: CommandExit
    wall_seconds: float

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return EXIT_CODES[self.outcome]
