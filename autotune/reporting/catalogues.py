"""The reports of ``autotune plan --gpu list`` (GPUs) and of ``autotune techniques`` (knobs and choices)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autotune.core.documents.catalogue import CatalogueOption, CatalogueRow
from autotune.core.gpu import Gpu
from autotune.reporting.document import Block, Document, Facts, Listing, Paragraph, Section, Table
from autotune.reporting.words import MISSING
from autotune.units import GIB

_WIDE = 72
_LINKS = ("PCIe", "NVLink")
_SPEEDS = ("GB/s", "bf16", "fp16", "tf32", "fp32", *_LINKS)
_MEANINGS = (
    "GiB: memory that CUDA can allocate. context, in GiB: memory of a PyTorch process outside its allocator. GB/s of "
    "the memory, and of PCIe and NVLink in one direction. Types: dense peaks in 1e12 operations per second."
)
_TOTAL = "memory is the driver's total, part of which cannot be allocated"
_UNVERIFIED = "whether autotune's rules hold for it has not been verified"
_SOURCES = "The source of every figure: autotune plan --gpu list --json"
_CHANGES = "changes-training"


def gpus_report(gpus: Sequence[Gpu], width: int) -> Document:
    """Return the catalogue for a terminal of ``width`` characters; below 72, without PCIe and NVLink."""
    titles = [title for title in _columns(gpus[0]) if width >= _WIDE or title not in _LINKS]
    rows = tuple(tuple(_columns(gpu)[title] for title in titles) for gpu in gpus)
    notes = tuple(map(Paragraph, (_MEANINGS, *_exceptions(gpus), _SOURCES)))
    return Document(None, (Section("GPUs", (Table(tuple(titles), rows),)), Section("Notes", notes)))


def _exceptions(gpus: Iterable[Gpu]) -> Iterable[str]:
    for gpu in gpus:
        facts = [_TOTAL if gpu.memory_kind == "total" else "", "" if gpu.verified else _UNVERIFIED]
        if any(facts):
            yield f"{gpu.name}: {'; '.join(filter(None, facts))}."


def _columns(gpu: Gpu) -> Mapping[str, str]:
    speeds, shown = gpu.speeds, dict.fromkeys(_SPEEDS, MISSING)
    if speeds is not None:
        giga = {"GB/s": speeds.bandwidth, "PCIe": speeds.pcie, "NVLink": speeds.nvlink}
        tera = {"bf16": speeds.bf16, "fp16": speeds.fp16, "tf32": speeds.tf32, "fp32": speeds.fp32}
        for unit, figures in ((1e9, giga), (1e12, tera)):
            shown |= {name: f"{value / unit:.0f}" for name, value in figures.items() if value is not None}
    memory, context = f"{gpu.memory_bytes / GIB:.1f}", f"{gpu.context_bytes / GIB:.2f}"
    return {"GPU": gpu.name, "GiB": memory, **shown, "context": context}


def techniques_report(rows: Iterable[CatalogueRow]) -> Document:
    """Return the catalogue of techniques."""
    return Document(None, tuple(Section(row.knob, tuple(_blocks(row))) for row in rows))


def _blocks(row: CatalogueRow) -> Iterator[Block]:
    facts = (
        f"default: {row.default}",
        f"needs: {row.needs}" if row.needs else "",
        f"--allow {row.knob}: {row.changes}" if row.changes else "",
        "" if row.in_default_space else "not in the default search space",
    )
    yield Listing(tuple(filter(None, facts)), f"{row.knob}  {row.summary}")
    unavailable = frozenset(str(option.choice) for option in row.options if not option.available)
    yield Facts(tuple((str(option.choice), _summary(option)) for option in row.options), unavailable)


def _summary(option: CatalogueOption) -> str:
    changes = " (changes training)" if option.effect == _CHANGES else ""
    missing = "" if option.available else f" (unavailable: {option.reason})"
    return f"{option.summary}{changes}{missing}"
