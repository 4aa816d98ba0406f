"""The report of ``autotune plan --gpu list``: the catalogue of GPUs and the sources of its figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autotune.core.gpu import Gpu
from autotune.reporting.document import Document, Paragraph, Section, Table
from autotune.reporting.words import MISSING
from autotune.units import GIB

_WIDE = 72
_LINKS = ("PCIe", "NVLink")
_MEANINGS = (
    "GiB: memory that CUDA can allocate. context, in GiB: memory of a PyTorch process outside its allocator. GB/s of "
    "the memory, and of PCIe and NVLink in one direction. Types: dense peaks in 1e12 operations per second."
)
_KINDS = {
    "total": "memory is the driver's total, part of which cannot be allocated",
    "nominal": "memory is the nominal size, part of which cannot be allocated",
}
_UNVERIFIED = "whether autotune's rules hold for it is not known"
_SOURCES = "The source of every figure: autotune plan --gpu list --json"


def gpus_report(gpus: Sequence[Gpu], width: int) -> Document:
    """Return the catalogue for a terminal of ``width`` characters; a narrow one omits links."""
    titles = [title for title in _columns(gpus[0]) if width >= _WIDE or title not in _LINKS]
    rows = tuple(tuple(_columns(gpu)[title] for title in titles) for gpu in gpus)
    notes = tuple(map(Paragraph, (_MEANINGS, *_exceptions(gpus), _SOURCES)))
    return Document(None, (Section("GPUs", (Table(tuple(titles), rows),)), Section("Notes", notes)))


def _exceptions(gpus: Iterable[Gpu]) -> Iterable[str]:
    for gpu in gpus:
        facts = [_KINDS.get(gpu.memory_kind, ""), "" if gpu.verified else _UNVERIFIED]
        if any(facts):
            yield f"{gpu.name}: {'; '.join(filter(None, facts))}."


def _columns(gpu: Gpu) -> Mapping[str, str]:
    speeds = gpu.speeds
    giga = (speeds.bandwidth, speeds.pcie, speeds.nvlink) if speeds is not None else (None,) * 3
    tera = (speeds.bf16, speeds.fp16, speeds.tf32, speeds.fp32) if speeds is not None else (None,) * 4
    bandwidth, pcie, nvlink = (_in(1e9, value) for value in giga)
    bf16, fp16, tf32, fp32 = (_in(1e12, value) for value in tera)
    return {
        "GPU": gpu.name,
        "GiB": f"{gpu.memory_bytes / GIB:.1f}",
        "GB/s": bandwidth,
        "bf16": bf16,
        "fp16": fp16,
        "tf32": tf32,
        "fp32": fp32,
        "PCIe": pcie,
        "NVLink": nvlink,
        "context": f"{gpu.context_bytes / GIB:.2f}",
    }


def _in(unit: float, value: float | None) -> str:
    return MISSING if value is None else f"{value / unit:.0f}"
