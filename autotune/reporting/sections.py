"""Sections that both the report about a search and the report about a plan have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.core.documents.estimate import Estimate
from autotune.core.files.yaml_text import yaml_line
from autotune.core.rows.epoch import Epoch
from autotune.reporting.document import Bar, Cell, Facts, Medium, Section, Table, memory_axis
from autotune.reporting.words import MISSING, duration_or_dash, mean_or_dash, number_or_dash, predicted_rate
from autotune.units import format_bytes, format_share

# PyTorch's memory categories in the order of training, then those of the allocator and the driver.
_CATEGORIES = (
    "parameter", "buffer", "gradient", "optimizer state", "activation", "outlier", "temporary", "rounding",
    "fragmentation", "context", "process",
)  # fmt: skip
_OTHER = "other"
_SMALLEST_SHARE = 1e-3


@dataclass(frozen=True)
class Value:
    """A value of the chosen candidate or of the baseline.

    Attributes:
        size: the number that a bar shows; None without a bar.
        whole: the size of a full bar; None for the greater of the two.
    """

    text: str
    size: float | None = None
    whole: float | None = None


def comparison_rows(chosen: Mapping[str, Value], baseline: Mapping[str, Value]) -> tuple[tuple[Cell, ...], ...]:
    """Return a row with bars for each label, except those without a value in both."""
    rows = []
    for label, ours in chosen.items():
        both = (ours, baseline.get(label, Value(MISSING)))
        whole = ours.whole or max((one.size for one in both if one.size is not None), default=0.0)
        cells = [
            (one.text, Bar(one.size / whole if one.size is not None and whole else None, role))
            for one, role in zip(both, ("recommended", "default"), strict=True)
        ]
        if any(one.text != MISSING for one in both):
            rows.append((label, *cells[0], *cells[1]))
    return tuple(rows)


def epoch_values(
    epoch: Epoch, compared: Sequence[Epoch], unit: str, estimate: Estimate | None = None
) -> dict[str, Value]:
    """Return the batches, the steps and the time of an epoch by label.

    Args:
        unit: unit of the trainer's batches, such as ``documents``.
        estimate: the estimate from which the time follows; None if it was measured.
    """
    dropped = any(each.row_coverage < 1 for each in compared)
    duration = duration_or_dash(epoch.seconds_per_epoch, [each.seconds_per_epoch for each in compared])
    return {
        "time per epoch": Value(predicted_rate(estimate, duration)),
        "tokens covered": Value(format_share(epoch.token_coverage)),
        **({"rows covered": Value(format_share(epoch.row_coverage))} if dropped else {}),
        "max_length": Value(f"{epoch.max_length:,}" if epoch.max_length is not None else "none"),
        "batch x accumulation": Value(f"{epoch.per_device_train_batch_size} x {epoch.gradient_accumulation_steps}"),
        f"{unit} per step": Value(mean_or_dash(epoch.documents_per_step)),
        "tokens per step": Value(number_or_dash(epoch.tokens_per_step)),
        "steps per epoch": Value(mean_or_dash(epoch.steps_per_epoch)),
    }


def comparison_sections(
    baseline: str, chosen: str, rows: tuple[tuple[Cell, ...], ...], medium: Medium = Medium.EVERYWHERE
) -> Iterator[Section]:
    """Yield the chosen candidate and the baseline, by their names, in one table with bars; nothing without rows."""
    if rows:
        yield Section(f"Compared with {baseline}", (Table(("", chosen, "", baseline, ""), rows),), medium)


def closing_section(title: str, facts: Iterable[tuple[str, str]], settings: Mapping[str, object]) -> Section:
    """Return the facts about a run, and its further arguments that differ from the defaults."""
    known = dict(facts)
    arguments = {name: yaml_line(value) for name, value in settings.items() if name not in known}
    return Section(title, (Facts((*known.items(), *arguments.items())),), Medium.PAGES)


def peak_sections(
    title: str, needs: Mapping[str, Mapping[str, int]], budget_bytes: int, medium: Medium = Medium.EVERYWHERE
) -> Iterator[Section]:
    """Yield the memory at the peak by category, with bars; ``needs`` has a breakdown for each estimate's name."""
    if not needs:
        return
    parts = _parts(list(needs.values()))
    total, sums = len(parts), [sum(sizes.values()) for sizes in needs.values()]
    scale_bytes = memory_axis(sums, budget_bytes)
    parts["sum"] = sums
    if scale_bytes >= budget_bytes:
        parts["memory budget"] = [budget_bytes] * len(needs)
    columns = ("memory at peak", *(title for name in needs for title in (name, "")))
    rows = tuple((name, *_with_bars(sizes, scale_bytes)) for name, sizes in parts.items())
    yield Section(title, (Table(columns, rows, total=total),), medium)


def _with_bars(sizes: Iterable[int], scale_bytes: int) -> Iterator[Cell]:
    for size, role in zip(sizes, ("recommended", "default"), strict=False):
        yield format_bytes(size) if size else MISSING
        yield Bar(size / scale_bytes, role)


def _parts(needs: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """Return the sizes of each estimate by category; small categories are summed under "other"."""
    names = dict.fromkeys((*_CATEGORIES, *(name for breakdown in needs for name in breakdown)))
    sizes = {name: [breakdown.get(name, 0) for breakdown in needs] for name in names}
    small = max(sum(breakdown.values()) for breakdown in needs) * _SMALLEST_SHARE
    shown = {name: parts for name, parts in sizes.items() if max(parts) >= small and name != _OTHER}
    others = [sum(parts) for parts in zip(*(sizes[name] for name in sizes if name not in shown), strict=True)]
    return {**shown, **({_OTHER: others} if any(others) else {})}


def page_title(trainer: str, model: str, dataset: str) -> str:
    """Return the title of a page, with the last parts of paths and of Hub ids."""
    short_model, short_dataset = (name.rstrip("/").rpartition("/")[2] or name for name in (model, dataset))
    return f"{trainer}: {short_model} on {short_dataset}"
