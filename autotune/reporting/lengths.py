"""The report of ``autotune lengths``: histogram, quantiles, and the share of tokens within each maximum length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.core.documents.length_report import QUANTILES, LengthBin, LengthReport
from autotune.core.rows.images import ImageLimit, ImageProfile
from autotune.reporting.document import Bar, Cell, Document, Paragraph, Section, Table, Tone, Verdict
from autotune.trainers import find_trainer
from autotune.trainers.length_limit import limits_rows
from autotune.units import format_bytes, format_share, plural

_FLOAT32_BYTES = 4
"""Bytes of one number in an image processor's output."""
_SMALLER_QUANTILES = (0.5, 0.95, 1.0)
_SMALLER_MEANING = (
    "Tokens of a row's images, and numbers in its pixel_values, with the image processor's setting and with smaller "
    "images:"
)
LIMITED = (
    "Smaller images need less memory and time, but lose detail: they change training, and autotune never chooses them."
)
_HOW_TO_LIMIT = (
    "TRL has no option for them. In a local copy of the model, change preprocessor_config.json, or image_processor in "
    "processor_config.json if that has it: set max_pixels, if present, to the number in the first column; otherwise "
    "set size.longest_edge. For no tiles, set do_image_splitting to false. Then give that copy to autotune and to trl."
)
_QUANTILES = {0.0: "shortest", 0.5: "median", 1.0: "longest"}


def lengths_report(report: LengthReport) -> Document:
    """Return the report about the lengths of rows."""
    dataset, split = report.workload.dataset, report.workload.dataset_source.split
    name = dataset.name if split == "train" else f"{dataset.name}, split {split}"
    has_limit = limits_rows(find_trainer(report.workload.trainer))
    single = dataset.documents.sequences == 1
    longest = "at most" if single else "longest sequence, at most"
    where = "in a row" if single else "in both sequences of a row"
    counts = f"{plural(report.rows, 'row')}, {report.tokens:,} tokens, {report.mean:,.0f} {where} on average"
    quantiles = [
        (_QUANTILES.get(one.share, f"{100 * one.share:.0f} %"), f"{one.tokens:,} tokens") for one in report.quantiles
    ]
    return Document(
        verdict=Verdict(
            f"{name} ({dataset.format}), tokenised for {report.workload.model.name}",
            Tone.PLAIN,
            remarks=(Paragraph(counts),),
        ),
        sections=(
            Section("Histogram", (_histogram(report.histogram, "tokens in a row" if single else "longest sequence"),)),
            Section("Quantiles", (_table(("share of rows", longest), quantiles),)),
            *(() if dataset.images is None else (_images(dataset.images),)),
            *((_smaller_images(dataset.images),) if dataset.images is not None and dataset.images.limits else ()),
            *((Section("Maximum lengths", (Paragraph(long_rows_text(report)), _limits(report))),) if has_limit else ()),
        ),
    )


def _images(images: ImageProfile) -> Section:
    shares = {**_QUANTILES, 0.0: "least", 1.0: "most"}
    rows = [
        (
            shares.get(share, f"{100 * share:.0f} %"),
            *(f"{of.quantile(share):,}" for of in (images.in_row, images.pixels, images.elements)),
            format_bytes(_FLOAT32_BYTES * images.elements.quantile(share)),
        )
        for share in QUANTILES
    ]
    titles = ("share", "images in a row", "pixels of an image", "numbers in pixel_values", "in float32")
    return Section("Images", (_table(titles, rows),))


def _smaller_images(images: ImageProfile) -> Section:
    """Return the sizes of images under smaller limits of the processor, and where to set a limit."""
    present, *_ = images.limits
    rows = [
        (
            f"{_setting_text(limit)}{' (now)' if limit is present else ''}",
            *(f"{limit.tokens.quantile(share):,}" for share in _SMALLER_QUANTILES),
            format_share(limit.tokens.tokens / present.tokens.tokens),
            f"{limit.elements.quantile(1.0):,}",
            format_share(limit.elements.tokens / present.elements.tokens),
        )
        for limit in images.limits
    ]
    titles = ("longest_edge", "median", "95 %", "most", "vs now", "largest pixel_values", "vs now")
    parts = (Paragraph(_SMALLER_MEANING), _table(titles, rows), Paragraph(LIMITED), Paragraph(_HOW_TO_LIMIT))
    return Section("Smaller images", parts)


def _setting_text(limit: ImageLimit) -> str:
    """Return the value of a limit: the largest area or length, or that images are not cut into tiles."""
    value = limit.setting.partition("=")[2]
    return f"{int(value):,}" if value.isdecimal() else "no tiles"


def _histogram(bins: Sequence[LengthBin], title: str) -> Table:
    """Return the number of rows by length; ``title`` is that of the first column."""
    most, tokens = max(part.rows for part in bins), sum(part.tokens for part in bins)
    rows = (
        (
            f"{part.low:,}" + (f" to {part.high:,}" if part.low != part.high else ""),
            f"{part.rows:,}",
            Bar(part.rows / most, "default"),
            format_share(part.tokens / tokens) if tokens else "-",
        )
        for part in bins
    )
    return _table((title, "rows", "", "share of tokens"), rows)


def _limits(report: LengthReport) -> Table:
    drops, cuts = _drops(report), _cuts(report)
    dropping = ("rows kept", "rows dropped") if drops else ()
    cutting = ("rows cut", "share of rows") if cuts or not drops else ()
    rows = []
    for limit in report.limits:
        kept = (f"{limit.max_length:,}", format_share(limit.coverage), f"{limit.tokens_dropped:,}")
        dropped = (format_share(limit.row_coverage), f"{limit.rows_dropped:,}")
        cut = (f"{limit.rows_cut:,}", format_share(limit.rows_cut / report.rows))
        rows.append((*kept, *(dropped if drops else ()), *(cut if cutting else ())))
    return _table(("max_length", "tokens kept", "tokens dropped", *dropping, *cutting), rows)


def _table(titles: tuple[str, ...], rows: Iterable[tuple[Cell, ...]]) -> Table:
    return Table(titles, tuple(rows), words=())


def _drops(report: LengthReport) -> bool:
    return any(limit.rows_dropped for limit in report.limits)


def _cuts(report: LengthReport) -> bool:
    return any(limit.rows_cut for limit in report.limits)


def long_rows_text(report: LengthReport) -> str:
    """Return whether rows longer than the maximum length are cut or dropped, as a sentence."""
    images = report.workload.dataset.images
    if images is not None:
        return (
            "TRL cuts rows that are longer than max_length, and fails if it cuts a token of an image: below a "
            f"max_length of {images.ends.longest:,}."
        )
    if not _drops(report):
        cut = "Rows that are longer than max_length are cut."
        return cut if _cuts(report) else "None of these lengths drops or cuts a row."
    if not _cuts(report):
        return "Rows that are longer than max_length are dropped whole; none is cut."
    return "Rows that are longer than max_length are cut, or dropped if no token would be left to train on."
