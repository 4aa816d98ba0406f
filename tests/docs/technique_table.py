"""Writes ``docs/techniques.md``: each technique with each trainer, from the catalogue and the installed TRL."""

from __future__ import annotations

import dataclasses
import textwrap
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
# Which settings are searched?

A **knob** is one setting that `autotune probe` and `autotune plan` vary; its values are **choices**. `make docs` writes
this page from the code; `autotune techniques` also explains each choice, and names those that this machine lacks.

```console
$ autotune probe MODEL DATASET --allow lora --fix attention=sdpa --exclude packing
```

| option | effect |
|---|---|
| none | choices that keep the gradient, up to rounding, are tried |
| `--allow KNOB` | choices that change training are tried, too |
| `--fix KNOB=CHOICE` | every candidate has this choice |
| `--exclude KNOB` | every candidate has TRL's default |
"""

MATRIX = """\
## Knobs by trainer

| cell | meaning |
|---|---|
| yes | tried, or tried with `--allow` |
| `--fix` | tried only with `--fix` or a `--space` file |
| no | never tried, since TRL refuses or ignores every other choice |
| ignored | TRL ignores the field, or it affects neither memory nor speed |
| - | the trainer's configuration has no such field |
| * | some choices differ: see [Exceptions](#exceptions) |
"""

LOSS_HEAD = """\
## Losses that depend on more knobs

With these settings, the knobs in the last column change training, and are searched only with `--allow`:

| setting | trainers | knobs |
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
    after = "If your own configuration packs rows, a loss that depends on `packing` depends on `max_length`, too."
    parts = (HEAD, _effects(), MATRIX, _table(), _exceptions(), LOSS_HEAD, _losses(), after, _guides())
    texts = (part if isinstance(part, str) else "".join(f"{line}\n" for line in part) for part in parts)
    return "\n".join(f"{text.rstrip()}\n" for text in texts).replace("|---|\n\n|", "|---|\n|")


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
    """Return the support of a technique by a trainer, in one word."""
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
        return "no"
    differs = "\\*" if impossible or own.restricted else ""
    return ("yes" if technique.name in _searched(trainer) else "`--fix`") + differs


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
    """Yield the techniques, in one row those that all trainers support alike."""
    yield f"| knob | {' | '.join(trainers())} |"
    yield f"|---|{'---|' * len(trainers())}"
    alike: dict[tuple[str, ...], list[str]] = {}
    for technique in catalogue():
        alike.setdefault(tuple(cell(technique, trainer) for trainer in trainers()), []).append(technique.name)
    for cells, knobs in alike.items():
        yield f"| {_listed(knobs)} | {' | '.join(cells)} |"


def _effects() -> Iterator[str]:
    """Yield a table of the techniques with their choices."""
    yield "## What each knob does"
    yield ""
    yield "`r16`, `every_2` and the like stand for any number."
    yield ""
    yield "| knob | effect, and what it needs | choices |"
    yield "|---|---|---|"
    for technique in catalogue():
        exact, changing = (
            _listed(option.choice for option in technique.options if option.effect is effect)
            for effect in (Effect.EXACT, Effect.CHANGES_TRAINING)
        )
        needs = f" Needs {technique.needs}." if technique.needs else ""
        choices = f"{exact}; **changes training:** {changing}: {technique.changes}" if changing else exact
        yield f"| `{technique.name}` | {technique.summary}{needs} | {choices} |"


def _exceptions() -> Iterator[str]:
    """Yield a table of what differs from that, by technique and trainers, and one of what plans leave out."""
    yield "## Exceptions"
    yield ""
    yield "| knob | trainers | exception |"
    yield "|---|---|---|"
    for technique in catalogue():
        known: dict[str, list[str]] = {}
        for trainer, difference in [*_everywhere(technique), *_differences(technique)]:
            if trainer not in trainers() or cell(technique, trainer) not in ("no", "ignored"):
                known.setdefault(difference, []).append(trainer)
        for difference, names in known.items():
            yield f"| `{technique.name}` | {', '.join(names)} | {difference} |"
    yield ""
    yield "## What plans do not predict"
    yield ""
    yield "| knob | not predicted |"
    yield "|---|---|"
    for technique in catalogue():
        if technique.impact.unplanned:
            yield f"| `{technique.name}` | {technique.impact.unplanned} |"


def _everywhere(technique: Technique) -> Iterator[tuple[str, str]]:
    """Yield the exceptions of a technique that hold for every trainer."""
    searched = [choice for name in trainers() for choice in _searched(name).get(technique.name, ())]
    possible = (option for option in technique.options if not technique.unavailable(option.choice, EIGHT_GPUS))
    left_out = [option.choice for option in possible if not any(map(option.has, searched))]
    if searched and left_out:
        yield "all", f"{_listed(left_out)}: only with `--fix`"
    for option in technique.options:
        reason = technique.unavailable(option.choice, EIGHT_GPUS)
        if reason is not None:
            yield "all", f"`{option.choice}`, unavailable to probes: {reason}"


def _differences(technique: Technique) -> Iterator[tuple[str, str]]:
    """Yield each trainer with its exceptions, in words."""
    for trainer, specification in trainers().items():
        if technique.name in (depends := specification.loss_depends_on({})):
            yield trainer, f"any choice but the default changes training: {depends[technique.name]}"
    for trainer, own in technique.by_trainer.items():
        if own.default is not None:
            changes = own.changes or (technique.changes if isinstance(technique, NumberTechnique) else "")
            more = f"; any other changes training: {changes}" if changes else ""
            yield trainer, f"TRL's default is `{own.default}`{more}"
        if own.without_effect:
            yield trainer, f"ignored: {own.without_effect}"
        for kind, found in {", never tried": own.refused, ", ignored": own.ignored, "": own.restricted}.items():
            for reason in dict.fromkeys(found.values()):
                choices = [choice for choice, why in found.items() if why == reason]
                yield trainer, f"{_listed(choices)}{kind}: {reason}"


def _listed(choices: Iterable[Choice]) -> str:
    return ", ".join(f"`{choice}`" for choice in choices)


def _guides() -> Iterator[str]:
    guides = " and ".join(f'"{guide}"' for guide in dict.fromkeys(guide for guide, _ in GUIDES))
    exceptions = "; ".join(f"`{name}`, since {reason}" for name, reason in ELSEWHERE.items())
    yield from textwrap.wrap(f"The knobs cover TRL's guides {guides}, except {exceptions}.", 120)
