"""Writes ``docs/techniques.md``: each technique with each trainer, from the catalogue and the installed TRL."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from autotune.core.candidate import Choice
from autotune.core.machine import Hardware, Machine
from autotune.inspection.software import OPTIONAL
from autotune.inspection.space_file import default_file, load
from autotune.techniques import catalogue
from autotune.techniques.base import (
    Effect,
    NumberTechnique,
    Technique,
    TrainerFacts,
    default_with,
    facts,
    refused_or_ignored,
)
from autotune.trainers import trainers
from tests.contract.building import config_class
from tests.docs.guides import ELSEWHERE, GUIDES

# Devices that lack nothing, and as many as any choice takes: what is unavailable on them is so on every machine.
_NEWEST = dict.fromkeys(OPTIONAL, "99") | {"trl": "99", "transformers": "99", "kernels": "0.18.2", "vllm": "0.31.0"}
EIGHT_GPUS = Machine(Hardware("cuda", "a GPU", 1, compute_capability=(9, 0), processes=8), _NEWEST)

HEAD = """\
# Techniques

What autotune does with each technique for each of TRL's trainers. `make docs` generates this page from the catalogue
and the installed TRL, and a test compares them.

| word | meaning |
|---|---|
| probed | measured by real training steps |
| on request | as probed, but only with `--fix` or a `--space` file: the shipped search space leaves it out |
| planned | traces predict its memory, and its time if the GPU's speeds are known |
| partly planned | as above, without what [its section](#what-each-one-does) names |
| emitted | in the bundle's `config.yaml` and `train.py` |
| not `choice` | no probe has that choice with this trainer: see its section |
| `choice` restricted | only some combinations have it: see its section |
| ignored | TRL does not use the field with this trainer, or it changes neither memory nor time: see its section |
| refused | never tried, with the reason here or in its section |

The table is for eight GPUs with every package installed. A choice that needs several GPUs, a GPU or a package is
refused without it; `autotune techniques` shows this for the machine that it runs on.

A choice is exact with a trainer's default loss, unless its section has an exception. Losses over all rows of a
micro-batch (DPO's `aot`, `aot_unpaired` and `sft`, GRPO's `bnpo` and its entropy, SFT's with models whose class has
`accepts_loss_kwargs = False`, such as Qwen2.5-VL, and the balance of a mixture of experts) depend on
`per_device_train_batch_size`, and the last two on `packing`. Those over a whole generation (GRPO's
`scale_rewards: batch`, RLOO's `normalize_advantages`) depend on `steps_per_generation`. NEFTune's noise depends on the
width of micro-batches: on `per_device_train_batch_size`, `packing`, `padding_free` and `pad_to_multiple_of`. What
depends on `packing` also depends on the `max_length` of rows that your own configuration packs. Other choices of these
are then searched only with `--allow`.

"""


def document() -> str:
    """Return the page."""
    return HEAD + "\n".join([*_table(), "", *_sections(), *_guides()]) + "\n"


def cell(technique: Technique, trainer: str) -> str:
    """Return what becomes of a technique with a trainer, in a few words."""
    own = facts(technique, trainer)
    if own.without_effect:
        return "ignored"
    missing = missing_fields(technique, trainer)
    if missing:
        return f"refused: no `{missing[0]}`"
    unusual = [option.choice for option in technique.options if option.choice != default_with(technique, trainer)]
    impossible = [choice for choice in unusual if _reason(technique, trainer, choice)]
    if unusual and unusual == impossible:
        return "refused"
    probed = "probed" if technique.name in _searched(trainer) else "on request"
    words = [probed, "partly planned" if technique.impact.unplanned else "planned", "emitted"]
    return ", ".join([
        *words, *(f"not `{choice}`" for choice in impossible), *(f"`{choice}` restricted" for choice in own.restricted)
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


def _reason(technique: Technique, trainer: str, choice: Choice) -> str | None:
    return technique.unavailable(choice, EIGHT_GPUS) or refused_or_ignored(technique, choice, trainer)


def _table() -> Iterator[str]:
    yield f"| technique | {' | '.join(trainers())} |"
    yield f"|---|{'---|' * len(trainers())}"
    for technique in catalogue():
        cells = (cell(technique, trainer) for trainer in trainers())
        yield f"| [`{technique.name}`](#{technique.name}) | {' | '.join(cells)} |"


def _sections() -> Iterator[str]:
    yield "## What each one does"
    yield ""
    for technique in catalogue():
        yield f"### {technique.name}"
        yield ""
        yield " ".join(_sentences(technique))
        yield ""
        exceptions = list(_exceptions(technique))
        yield from exceptions
        yield from [""] if exceptions else []


def _sentences(technique: Technique) -> Iterator[str]:
    yield technique.summary
    changing = [option.choice for option in technique.options if option.effect is Effect.CHANGES_TRAINING]
    exact = [option.choice for option in technique.options if option.effect is Effect.EXACT]
    if not changing:
        yield "Exact: the training stays the same."
    else:
        yield f"Exact: {_listed(exact)}."
        yield f"Changes training: {_listed(changing)}; {technique.changes}."
    searched = [choice for name in trainers() for choice in _searched(name).get(technique.name, ())]
    possible = (option for option in technique.options if not technique.unavailable(option.choice, EIGHT_GPUS))
    left_out = [option.choice for option in possible if not any(map(option.has, searched))]
    if searched and left_out:
        yield f"Only on request: {_listed(left_out)}."
    if technique.needs:
        yield f"Needs {technique.needs}."
    if technique.impact.unplanned:
        yield f"Not planned: {technique.impact.unplanned}."


def _exceptions(technique: Technique) -> Iterator[str]:
    for option in technique.options:
        reason = technique.unavailable(option.choice, EIGHT_GPUS)
        if reason is not None:
            yield f"- everywhere: `{option.choice}` refused: {reason}."
    known: dict[tuple[str, str, str], list[str]] = {}
    for name, specification in trainers().items():
        if technique.name in (depends := specification.loss_depends_on({})):
            yield f"- {name}: any other choice than the default changes training: {depends[technique.name]}."
    for trainer, own in technique.by_trainer.items():
        yield from (f"- {trainer}: {difference}." for difference in _differences(technique, own))
        for kind, found in {"refused": own.refused, "ignored": own.ignored, "restricted": own.restricted}.items():
            for choice, reason in found.items():
                known.setdefault((trainer, kind, reason), []).append(str(choice))
    for (trainer, kind, reason), choices in known.items():
        yield f"- {trainer}: {_listed(choices)} {kind}: {reason}."


def _differences(technique: Technique, own: TrainerFacts) -> Iterator[str]:
    if own.default is not None:
        changes = own.changes or (technique.changes if isinstance(technique, NumberTechnique) else "")
        yield f"TRL's default is `{own.default}`" + (f"; any other changes training: {changes}" if changes else "")
    if own.without_effect:
        yield f"ignored: {own.without_effect}"


def _listed(choices: Iterable[Choice]) -> str:
    return ", ".join(f"`{choice}`" for choice in choices)


def _guides() -> Iterator[str]:
    yield "## What TRL's guides name"
    yield ""
    yield "| guide | what it names | here |"
    yield "|---|---|---|"
    names = {technique.name for technique in catalogue()}
    for (guide, section), techniques in GUIDES.items():
        here = [f"[`{name}`](#{name})" if name in names else f"{name}: {ELSEWHERE[name]}" for name in techniques]
        yield f"| {guide} | {section} | {', '.join(here)} |"
