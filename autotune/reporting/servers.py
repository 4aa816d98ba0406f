"""How several GPUs are split between a vLLM server and the training, in sentences and in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from autotune.core.estimate import Plan
from autotune.core.vllm import ServerSplit
from autotune.reporting.copied import copied
from autotune.reporting.plan_words import said_choices
from autotune.units import format_bytes, format_seconds

TITLE = "vLLM on GPUs of its own"
_UNKNOWN_TIME = (
    "How long vLLM generates is not known, so nothing says which split is the fastest: measure those that fit."
    " --output DIR writes config.yaml and a script of each command, with --server-gpus N for the split of your choice."
)


def said_servers(plan: Plan) -> tuple[str, ...]:
    """Return what a plan says of splits, in sentences with their commands; none if it has none."""
    found = [sentence for split in plan.servers for sentence in (_said(split, plan), *_commands(split))]
    return (*found, _UNKNOWN_TIME) if any(split.fits for split in plan.servers) else tuple(found)


def drawn_servers(plan: Plan) -> Iterable[RenderableType]:
    """Return the parts of the splits of a plan; nothing if it has none."""
    if not plan.servers:
        return
    yield Text()
    yield Text(TITLE, style="bold")
    for split in plan.servers:
        style = "" if split.fits else "red"
        yield Padding(Text(_said(split, plan), style=style), (0, 0, 0, 2), expand=False)
        for command in _commands(split):
            yield copied("    ", command)
    if any(split.fits for split in plan.servers):
        yield Padding(Text(_UNKNOWN_TIME), (0, 0, 0, 2), expand=False)


def _said(split: ServerSplit, plan: Plan) -> str:
    generate = "1 GPU generates" if split.generation == 1 else f"{split.generation} GPUs generate"
    train = "1 trains" if split.training == 1 else f"{split.training} train"
    who = f"{generate}, {train}"
    if split.reason or split.candidate is None:
        return f"{who}: not possible: {split.reason}."
    spare = format_bytes(abs(split.training_spare_bytes))
    fits = f"{spare} to spare" if split.fits else f"{spare} are missing"
    seconds = split.training_seconds
    step = f", and a step takes {format_seconds(seconds)} beside the generation" if seconds is not None else ""
    held = f", and its cache holds {int(split.sequences):,} of the longest sequences" if split.sequences else ""
    return (
        f"{who}: training needs {format_bytes(split.training_bytes)} of each, {fits}{step}. The server takes"
        f" {format_bytes(split.server_bytes)} of each of its own{held}. {said_choices(split.candidate, plan)}"
    )


def _commands(split: ServerSplit) -> Iterator[str]:
    if split.fits:
        yield split.serve
        yield split.train
