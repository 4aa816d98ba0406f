"""Writes ``docs/techniques.md``: each technique with each trainer, from the catalogue and the installed TRL."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from autotune.core.candidate import Choice
from autotune.core.machine import Hardware, Machine
from autotune.core.workload import ModelProfile
from autotune.inspection.software import OPTIONAL
from autotune.inspection.space_file import default_file, load
from autotune.techniques import catalogue
from autotune.techniques.base import (
    Effect,
    NumberTechnique,
    Technique,
    default_with,
    facts,
    refused_or_ignored,
)
from autotune.trainers import trainers
from tests.contract.building import config_class
from tests.docs.guides import ELSEWHERE, GUIDES
from tests.settings import workload

# Devices that lack nothing, and as many as any choice takes: what is unavailable on them is so on every machine.
NEWEST = dict.fromkeys(OPTIONAL, "99") | {"trl": "99", "transformers": "99", "kernels": "0.18.2", "vllm": "0.31.0"}
EIGHT_GPUS = Machine(Hardware("cuda", "a GPU", 1, compute_capability=(9, 0), processes=8), NEWEST)

HEAD = """\
# Techniques

Support of each technique by trainer, on eight GPUs with every package installed (generated from the code by
`make docs`). `autotune techniques` explains each choice, and shows what this machine lacks.

| word | meaning |
|---|---|
| probed | measured by real training steps; traces predict its memory, and its time if the GPU's speeds are known |
| on request | the same, but only with `--fix` or a `--space` file: the shipped search space leaves it out |
| partly planned | traces lack a part of its effect, see [the exceptions](#exceptions) |
| not `choice` | no probe has that choice with this trainer |
| `choice` restricted | only some combinations have it |
| ignored | TRL does not use the field with this trainer, or it changes neither memory nor time |
| refused | never tried, for the reason under [exceptions](#exceptions) |
| - | TRL's configuration of this trainer has no field for it |

Of a family of choices one is named: `r16` stands for every rank.

A choice is exact (the training stays the same) with a trainer's default loss, apart from the exceptions. Other losses
depend on these knobs too, which are then searched only with `--allow`:

| configuration | trainers | knobs |
|---|---|---|
"""


@dataclasses.dataclass(frozen=True)
class Loss:
    """A configuration whose loss depends on knobs that are exact with the default loss.

    Attributes:
        words: the configuration, in the page.
        trainers: those that have it; empty: all.
        args: fields of one such configuration.
        model: the model that is trained.
        processes: number of training processes.
        columns: of the dataset.
    """

    words: str
    trainers: tuple[str, ...]
    args: Mapping[str, object]
    model: ModelProfile | None = None
    processes: int = 1
    columns: tuple[str, ...] = ()


LOSSES = (
    Loss("`loss_type` is or has `aot`, `aot_unpaired` or `sft`", ("dpo",), {"loss_type": "aot"}),
    Loss("`loss_type: bnpo`", ("grpo",), {"loss_type": "bnpo"}),
    Loss(
        "`entropy_coef`, `use_adaptive_entropy` or `top_entropy_quantile`",
        ("grpo",),
        {"loss_type": "grpo", "entropy_coef": 0.1},
    ),
    Loss(
        "`scale_rewards: batch` or `multi_objective_aggregation: normalize_then_sum`",
        ("grpo",),
        {"loss_type": "grpo", "scale_rewards": "batch"},
    ),
    Loss("`normalize_advantages`", ("rloo",), {"normalize_advantages": True}),
    Loss(
        "a model whose class has `accepts_loss_kwargs = False`, such as Qwen2.5-VL",
        ("sft",),
        {},
        dataclasses.replace(workload().model, accepts_loss_kwargs=False),
    ),
    Loss(
        "`average_tokens_across_devices: false` with several processes",
        ("sft",),
        {"average_tokens_across_devices": False},
        processes=2,
    ),
    Loss("rows with `seq_lengths`, which are packed already", ("sft",), {}, columns=("seq_lengths",)),
    Loss("`router_aux_loss_coef` of a mixture of experts", (), {"router_aux_loss_coef": 0.001}),
    Loss("`neftune_noise_alpha`", (), {"neftune_noise_alpha": 5}),
)


def document() -> str:
    """Return the page."""
    after = [
        "",
        "If such a loss depends on `packing`, and your own configuration packs rows, it also depends on `max_length`.",
    ]
    lines = [*_losses(), *after, "", *_table(), "", *_effects(), *_exceptions(), *_guides()]
    return HEAD + "\n".join(lines) + "\n"


def _losses() -> Iterator[str]:
    """Yield a row for each configuration and the trainers with the same knobs."""
    for loss in LOSSES:
        alike: dict[tuple[str, ...], list[str]] = {}
        for name, known in trainers().items():
            # The exceptions have the dependences of a trainer's default loss.
            usual = () if loss.trainers else known.loss_depends_on({}).keys()
            depends = known.loss_depends_on(loss.args, loss.model, loss.processes, loss.columns).keys() - usual
            knobs = tuple(each.name for each in known.techniques if each.name in depends)
            if knobs and name in (loss.trainers or (name,)):
                alike.setdefault(knobs, []).append(name)
        for knobs, names in alike.items():
            yield f"| {loss.words} | {', '.join(names)} | {_listed(knobs)} |"


def cell(technique: Technique, trainer: str) -> str:
    """Return what becomes of a technique with a trainer, in a few words."""
    own = facts(technique, trainer)
    if own.without_effect:
        return "ignored"
    if missing_fields(technique, trainer):
        return "-"
    unusual = [
        option.choice
        for option in technique.options
        if option.choice != default_with(technique, trainer) and not technique.unavailable(option.choice, EIGHT_GPUS)
    ]
    impossible = [choice for choice in unusual if refused_or_ignored(technique, choice, trainer)]
    if unusual and unusual == impossible:
        return "refused"
    return ", ".join([
        "probed" if technique.name in _searched(trainer) else "on request",
        *(["partly planned"] if technique.impact.unplanned else []),
        *(f"not `{choice}`" for choice in impossible),
        *(f"`{choice}` restricted" for choice in own.restricted),
    ])  # fmt: skip


def missing_fields(technique: Technique, trainer: str) -> list[str]:
    """Return the fields that a technique writes and the trainer's configuration of the installed TRL does not have."""
    known = {field.name for field in dataclasses.fields(config_class(trainer))}
    written = {path.split(".")[1] for path in technique.writes if path.startswith("args.")}
    return sorted(written - known)


@cache
def _searched(trainer: str) -> Mapping[str, tuple[Choice, ...]]:
    """Return the choices of the shipped search space, by technique."""
    return load(default_file(trainer), trainer, trainers()[trainer].techniques).choices


def _table() -> Iterator[str]:
    yield f"| technique | {' | '.join(trainers())} |"
    yield f"|---|{'---|' * len(trainers())}"
    for technique in catalogue():
        cells = (cell(technique, trainer) for trainer in trainers())
        yield f"| `{technique.name}` | {' | '.join(cells)} |"


def _effects() -> Iterator[str]:
    """Yield a table of the techniques with their choices."""
    yield "## What each one does"
    yield ""
    yield "| technique | effect | exact choices | choices that change training | needs |"
    yield "|---|---|---|---|---|"
    for technique in catalogue():
        exact, changing = (
            _listed(option.choice for option in technique.options if option.effect is effect)
            for effect in (Effect.EXACT, Effect.CHANGES_TRAINING)
        )
        how = f"{changing}: {technique.changes}" if changing else ""
        yield f"| `{technique.name}` | {technique.summary.rstrip('.')} | {exact} | {how} | {technique.needs} |"
    yield ""


def _exceptions() -> Iterator[str]:
    """Yield a table of what differs from that, by technique and trainers."""
    yield "## Exceptions"
    yield ""
    yield "| technique | trainers | exception |"
    yield "|---|---|---|"
    for technique in catalogue():
        known: dict[str, list[str]] = {}
        for trainer, difference in [*_everywhere(technique), *_differences(technique)]:
            known.setdefault(difference, []).append(trainer)
        for difference, names in known.items():
            yield f"| `{technique.name}` | {', '.join(names)} | {difference} |"
    yield ""


def _everywhere(technique: Technique) -> Iterator[tuple[str, str]]:
    """Yield the exceptions of a technique that hold for every trainer."""
    searched = [choice for name in trainers() for choice in _searched(name).get(technique.name, ())]
    possible = (option for option in technique.options if not technique.unavailable(option.choice, EIGHT_GPUS))
    left_out = [option.choice for option in possible if not any(map(option.has, searched))]
    if searched and left_out:
        yield "all", f"{_listed(left_out)} only on request"
    for option in technique.options:
        reason = technique.unavailable(option.choice, EIGHT_GPUS)
        if reason is not None:
            yield "all", f"`{option.choice}` refused: {reason}"
    if technique.impact.unplanned:
        yield "all", f"not planned: {technique.impact.unplanned}"


def _differences(technique: Technique) -> Iterator[tuple[str, str]]:
    """Yield each trainer with its exceptions, in words."""
    for trainer, specification in trainers().items():
        if technique.name in (depends := specification.loss_depends_on({})):
            yield trainer, f"any other choice than the default changes training: {depends[technique.name]}"
    for trainer, own in technique.by_trainer.items():
        if own.default is not None:
            changes = own.changes or (technique.changes if isinstance(technique, NumberTechnique) else "")
            more = f"; any other changes training: {changes}" if changes else ""
            yield trainer, f"TRL's default is `{own.default}`{more}"
        if own.without_effect:
            yield trainer, f"ignored: {own.without_effect}"
        for kind, found in {"refused": own.refused, "ignored": own.ignored, "restricted": own.restricted}.items():
            for reason in dict.fromkeys(found.values()):
                choices = [choice for choice, why in found.items() if why == reason]
                yield trainer, f"{_listed(choices)} {kind}: {reason}"


def _listed(choices: Iterable[Choice]) -> str:
    return ", ".join(f"`{choice}`" for choice in choices)


def _guides() -> Iterator[str]:
    yield "## What TRL's guides name"
    yield ""
    guides = " and ".join(f'"{guide}"' for guide in dict.fromkeys(guide for guide, _ in GUIDES))
    yield f"Everything in {guides} is one of these techniques, except"
    yield ""
    yield from (f"- `{name}`: {reason}." for name, reason in ELSEWHERE.items())
