"""``autotune plan --gpu all`` in a terminal: GPUs with speed and cost, and those that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.core.rent import Offer, Rent
from autotune.reporting.listing import listing
from autotune.reporting.words import BASELINE_NAME, MISSING, said_bytes, said_rate
from autotune.units import format_duration


def show_rent(found: Rent, console: Console) -> None:
    """Print a table of GPUs."""
    for part in drawn_rent(found, console.width):
        console.print(part)


def said_asked(found: Rent) -> str:
    """Return the workload, and on how many GPUs of each kind it was planned."""
    fixed = found.settings.get("fix")
    words = " ".join(f"{knob}={choice}" for knob, choice in fixed.items()) if isinstance(fixed, dict) else ""
    number = found.num_processes
    each = "the fewest GPUs that fit" if number == "auto" else "1 GPU" if number == 1 else f"{number} GPUs"
    more = ", and for more while each trains more" if number == "auto" else ""
    names = list(dict.fromkeys(offer.gpu.name for offer in found.offers))
    kinds = f"{each} of each of {len(names)} kinds{more}" if len(names) > 1 else f"{each}{more}: {names[0]}"
    return (
        f"{found.model} on {found.dataset}, global batch {found.global_batch_size}"
        f"{f', with {words}' if words else ''}, planned for {kinds}"
    )


def said_best(found: Rent) -> str:
    """Return the cheapest and the fastest in one sentence each, or that nothing fits."""
    fitting = [offer for offer in found.offers if offer.fits]
    if not fitting:
        return "Nothing is predicted to fit on any of these GPUs."
    fastest, cheapest = found.fastest, found.cheapest
    if fastest is None:
        alone = len(fitting) == 1
        return (
            "1 of these fits, and its speed is not known." if alone else f"{len(fitting)} fit, and no speed is known."
        )
    if cheapest is not None and cheapest is fastest:
        return f"The cheapest and the fastest: {_said_offer(fastest, found)}."
    sentences = [f"The cheapest: {_said_offer(cheapest, found)}."] if cheapest is not None else []
    return " ".join([*sentences, f"The fastest: {_said_offer(fastest, found)}."])


def _said_offer(offer: Offer, found: Rent) -> str:
    cost = f" for {said_cost(offer)}" if offer.cost is not None else ""
    doubt = "" if offer.sure else ", which may not fit (see the notes)"
    return f"{said_gpus(offer)}, {said_rate(offer.tokens_per_second)}, {said_time(offer)} per {found.unit}{cost}{doubt}"


def said_gpus(offer: Offer) -> str:
    """Return a number of GPUs, such as ``4 x H100-SXM``."""
    return f"{offer.processes} x {offer.gpu.name}"


def said_time(offer: Offer) -> str:
    """Return the time of the unit of the table, or a dash."""
    return MISSING if offer.seconds is None else format_duration(offer.seconds)


def said_cost(offer: Offer) -> str:
    """Return the cost in the currency of the user's prices, with two digits at least, or a dash."""
    if offer.cost is None:
        return MISSING
    return f"{offer.cost:,.2f}" if offer.cost >= 1 else f"{offer.cost:.2g}"


def titles(found: Rent) -> tuple[str, ...]:
    """Return the titles of the table's columns; there is none of costs without prices."""
    costs = (f"cost per {_short(found)}",) if found.priced else ()
    return ("GPUs", "needs of each", "to spare", "host", "tok/s", "per GPU", f"time per {_short(found)}", *costs)


def cells(offer: Offer, found: Rent) -> tuple[str, ...]:
    """Return the figures of an offer that fits, as long as :func:`titles`."""
    memory = offer.estimate.memory if offer.estimate is not None else None
    rate = offer.tokens_per_second
    costs = (said_cost(offer),) if found.priced else ()
    return (
        said_gpus(offer),
        said_bytes(memory.device_bytes if memory is not None else None),
        said_bytes(offer.estimate.spare_bytes if offer.estimate is not None else None),
        said_bytes(memory.host_need_bytes if memory is not None else None),
        MISSING if rate is None else f"{rate:,.0f}",
        MISSING if offer.rate_of_each is None else f"{offer.rate_of_each:,.0f}",
        said_time(offer),
        *costs,
    )


def said_configuration(offer: Offer) -> str:
    """Return the fastest configuration by its differences from TRL's default."""
    return " ".join(f"{knob}={choice}" for knob, choice in offer.differences.items()) or BASELINE_NAME


def said_unfit(found: Rent) -> tuple[str, ...]:
    """Return one line for each offer that does not fit, with the reason."""
    return tuple(f"{said_gpus(offer)}: {offer.reason}" for offer in found.offers if not offer.fits)


def said_traces(found: Rent) -> str:
    """Return what the table stands on."""
    return f"{found.trace_count} traces ({found.new_trace_count} new) in {format_duration(found.wall_seconds)}."


def drawn_rent(found: Rent, width: int) -> Iterable[RenderableType]:
    """Return the parts of the table for a console of ``width`` characters, top to bottom."""
    fitting = [offer for offer in found.offers if offer.fits]
    yield Text(said_asked(found))
    yield Text()
    yield Text(said_best(found), style="bold green" if fitting else "bold red")
    if fitting:
        yield Text()
        yield _table(found, fitting)
        yield Text()
        yield Text("The fastest configuration there, by what differs from TRL's default:", style="bold")
        yield from _configurations(fitting, width)
    yield listing("Does not fit", said_unfit(found))
    yield Text()
    yield Text(said_traces(found))
    yield listing("Notes", found.notes)


def _table(found: Rent, fitting: Sequence[Offer]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, title in enumerate(titles(found)):
        table.add_column(title, justify="right" if number else "left")
    for offer in fitting:
        table.add_row(*cells(offer, found))
    return table


def _configurations(fitting: Sequence[Offer], width: int) -> Iterable[RenderableType]:
    """Return each configuration once, with the GPUs on which it is the fastest."""
    names: dict[str, list[str]] = {}
    for offer in fitting:
        names.setdefault(said_configuration(offer), []).append(said_gpus(offer))
    for words, gpus in names.items():
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=1)
        grid.add_column(overflow="fold", max_width=width - 2)
        grid.add_row("", Text(", ".join(gpus)))
        grid.add_row("", Text(f"  {words}", style="bold"))
        yield grid


def _short(found: Rent) -> str:
    return "epoch" if found.unit == "epoch" else "1e9 tokens"
