"""Sections that both the report about a search and the report about a plan have."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.core.epoch import Epoch
from autotune.core.length_report import LengthBin, LengthLimit
from autotune.core.memory_timeline import MemoryTimeline
from autotune.reporting.document import Bar, Cell, Facts, Medium, Paragraph, Section, Snippet, Step, Table, memory_axis
from autotune.reporting.lengths import histogram
from autotune.reporting.words import MISSING, duration_or_dash, mean_or_dash, number_or_dash
from autotune.units import counted, format_bytes, format_share

_UNITS = {"timeout": "s", "memory_budget": "B", "gpu": "B"}
"""Units, on the command line, of settings that are numbers in the API."""
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


def epoch_values(epoch: Epoch, compared: Iterable[Epoch], unit: str) -> dict[str, Value]:
    """Return the batches, the steps and the time of an epoch by label.

    Args:
        unit: unit of the trainer's batches, such as ``documents``.
    """
    dropped = any(each.row_coverage < 1 for each in compared)
    return {
        "time per epoch": Value(duration_or_dash(epoch.seconds_per_epoch)),
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


def closing_section(
    title: str, facts: Iterable[tuple[str, str]], lead: str, command: str, settings: Mapping[str, object]
) -> Section:
    """Return the facts about a run, and the command that repeats it."""
    return Section(title, (Facts(tuple(facts)), Snippet(lead, repeat_command(command, settings))), Medium.PAGES)


def step_memory(
    candidates: Iterable[tuple[str, str, MemoryTimeline | None, str]], *, predicted: bool
) -> tuple[tuple[Step, ...], str]:
    """Return the memory through one step of the compared candidates, and why it is missing, in a sentence.

    Args:
        candidates: role, name, timeline and measurements of each.
        predicted: whether the run traced candidates.
    """
    known, missing = list[Step](), list[str]()
    for role, name, timeline, measured in candidates:
        if timeline is None:
            missing.append(name)
        elif timeline.moments:
            known.append(Step(role, name, timeline, measured))
    why = "it was not traced" if predicted else "predictions were turned off, and with them traces"
    untraced = f"The memory of a step over time is not known ({', '.join(missing)}): {why}." if missing else ""
    return tuple(known), untraced


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


def length_sections(bins: tuple[LengthBin, ...], limit: LengthLimit | None, subject: str) -> Iterator[Section]:
    """Yield the histogram of row lengths, with the maximum length of the candidate ``subject``; nothing without rows.

    Args:
        limit: None if no maximum length applies to rows.
    """
    if not bins:
        return
    changed = {} if limit is None else {"cuts": limit.rows_cut, "drops": limit.rows_dropped}
    numbers = " and ".join(f"{verb} {number:,}" for verb, number in changed.items() if number)
    rows, maximum = f"{counted(sum(part.rows for part in bins), 'row')} of up to {bins[-1].high:,} tokens", None
    if limit is not None and numbers:
        rows, maximum = f"{rows}; {subject} {numbers} (max_length {limit.max_length:,})", limit.max_length
    elif limit is not None:
        rows = f"{rows}; {subject} keeps all their tokens"
    yield Section("Length of rows", (Paragraph(f"{rows}."), histogram(bins, limit=maximum)), Medium.PAGES)


def repeat_command(command: str, settings: Mapping[str, object]) -> str:
    """Return the command that repeats a run or a plan.

    Args:
        settings: values that differ from the defaults, by the API's parameters. ``model`` and ``dataset`` are
            positional: a dataset without a model (from ``--base``) follows the placeholder MODEL.
    """
    model, dataset = settings.get("model"), settings.get("dataset")
    given = (model or "MODEL", dataset) if dataset else (model,) if model else ()
    words = ["autotune", command, *map(str, given)]
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        match value:
            case _ if name in ("model", "dataset") or value is None:
                pass
            case Mapping() if name == "prices":
                pass  # The command line takes a file of prices.
            case bool():
                words.append(option if value else f"--no-{option[2:]}")
            case Mapping():
                words += [word for knob, choice in value.items() for word in _option(option, f"{knob}={choice}")]
            case list() | tuple():
                words += _option(option, ",".join(map(str, value))) if value else []
            case _:
                words += _option(option, f"{value}{'' if isinstance(value, str) else _UNITS.get(name, '')}")
    return shlex.join(words)


def _option(name: str, value: str) -> list[str]:
    """Return the words of an option; a value that starts with a dash needs ``=``."""
    return [f"{name}={value}"] if value.startswith("-") else [name, value]


def page_title(trainer: str, model: str, dataset: str) -> str:
    """Return the title of a page, with the last parts of paths and of Hub ids."""
    short_model, short_dataset = (name.rstrip("/").rpartition("/")[2] or name for name in (model, dataset))
    return f"{trainer}: {short_model} on {short_dataset}"
