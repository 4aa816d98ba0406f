"""The report of ``autotune plan --gpu all``: GPUs with speed and cost, and those that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autotune.core.documents.rent import Offer, Rent, Unit
from autotune.reporting import words
from autotune.reporting.document import Document, Paragraph, Section, Table, Tone, Verdict, listing
from autotune.reporting.plan import traces_text, workload_and_gpus_text
from autotune.units import plural


def rent_report(rent: Rent) -> Document:
    """Return the report about a comparison of GPUs."""
    fitting = [offer for offer in rent.offers if offer.fits]
    return Document(
        subject=_subject(rent),
        verdict=Verdict(best_text(rent), Tone.GOOD if fitting else Tone.BAD),
        sections=(
            *_fitting_sections(rent, fitting),
            *listing("Does not fit, or cannot be planned", unfit_lines(rent)),
            Section("Traces", (Paragraph(f"{traces_text(rent)}."),)),
            *listing("Notes", rent.notes),
        ),
    )


def _fitting_sections(rent: Rent, fitting: Sequence[Offer]) -> Iterator[Section]:
    """Yield the figures of the offers that fit, and each configuration with the GPUs on which it is the fastest."""
    if not fitting:
        return
    unit = "epoch" if rent.unit == "epoch" else "1e9 tokens"
    costs = (f"cost per {unit}",) if rent.priced else ()
    each = ("per GPU",) if any(offer.processes > 1 for offer in fitting) else ()
    needs = "needs of each" if each else "needs"
    columns = ("GPUs", needs, "to spare", "host", "tok/s", *each, f"time per {unit}", *costs)
    rows = tuple(_cells(offer, several=bool(each), priced=rent.priced) for offer in fitting)
    yield Section("GPUs", (Table(columns, rows),))
    choices = ((offer, words.format_choices(offer.differences) or words.BASELINE_NAME) for offer in fitting)
    yield from listing("The best configuration on each, as differences from TRL's default", _by_text(choices))


def _subject(rent: Rent) -> str:
    """Return the workload, and the number of GPUs of each kind for which it was planned."""
    number, more = rent.num_processes, ", and for more while throughput per GPU rises"
    each, more = ("the fewest GPUs that fit", more) if number == "auto" else (plural(number, "GPU"), "")
    names = list(dict.fromkeys(offer.gpu.name for offer in rent.offers))
    kinds = f"{each} of each of {len(names)} kinds{more}" if len(names) > 1 else f"{each}{more}: {names[0]}"
    return workload_and_gpus_text(rent, kinds)


def best_text(rent: Rent) -> str:
    """Return the cheapest and the fastest offer in one sentence each, or that nothing fits."""
    fitting = [offer for offer in rent.offers if offer.fits]
    if not fitting:
        return "Nothing is predicted to fit on any of these GPUs."
    fastest, cheapest = rent.fastest, rent.cheapest
    if fastest is None:
        return f"{plural(len(fitting), 'of these fits', 'of these fit')}, and no speed is known."
    if cheapest is not None and cheapest is fastest:
        return f"The cheapest and the fastest: {offer_text(fastest, rent.unit)}."
    sentences = [f"The cheapest: {offer_text(cheapest, rent.unit)}."] if cheapest is not None else []
    return " ".join([*sentences, f"The fastest: {offer_text(fastest, rent.unit)}."])


def offer_text(offer: Offer, unit: Unit) -> str:
    """Return an offer with its speed and cost in the unit of a table, or why nothing fits; without a full stop."""
    if not offer.fits:
        return f"{offer.gpus}: {offer.reason.rstrip('.')}"
    cost = f" for {words.predicted_rate(offer.estimate, words.cost_text(offer.cost))}" if offer.cost is not None else ""
    doubt = "" if offer.fits_with_error else ", which may not fit"
    rate = words.predicted_rate(offer.estimate, words.rate_or_dash(offer.tokens_per_second))
    duration = words.predicted_rate(offer.estimate, words.duration_or_dash(offer.seconds))
    return f"{offer.gpus}, {rate}, {duration} per {unit}{cost}{doubt}"


def _cells(offer: Offer, *, several: bool, priced: bool) -> tuple[str, ...]:
    rates = (offer.tokens_per_second, *((offer.rate_of_each,) if several else ()))
    figures = (*map(words.number_or_dash, rates), words.duration_or_dash(offer.seconds))
    figures = (*figures, *((words.cost_text(offer.cost),) if priced else ()))
    marked = (words.predicted_rate(offer.estimate, figure) for figure in figures)
    return offer.gpus, *words.memory_cells(offer.estimate), *marked


def unfit_lines(rent: Rent) -> tuple[str, ...]:
    """Return the offers that do not fit, or cannot be planned, by their reasons."""
    return _by_text((offer, offer.reason) for offer in rent.offers if not offer.fits)


def _by_text(texts: Iterable[tuple[Offer, str]]) -> tuple[str, ...]:
    """Return one line for each text, after the offers that have it."""
    names: dict[str, list[str]] = {}
    for offer, text in texts:
        names.setdefault(text, []).append(offer.gpus)
    return tuple(f"{', '.join(gpus)}: {text}" for text, gpus in names.items())
