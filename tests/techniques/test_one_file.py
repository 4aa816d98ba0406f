"""A technique is one file: it declares the effect of its choices on traces."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import autotune.techniques
from autotune.core.plan import TrainingPlan
from autotune.planning.single import depths_of
from autotune.techniques import catalogue, find, traits
from autotune.techniques.base import Technique
from autotune.techniques.traits import library_patches_key, without_sizes
from autotune.trainers import base, find_trainer
from autotune.trainers.base import Trainer
from tests.settings import GPU, setting

KNOB = '''
from autotune.techniques.base import Option, Technique
from autotune.techniques.trace_impact import PlanImpact, Scope, TraceImpact


class Knob(Technique):
    """A field of ``transformers.TrainingArguments`` that has no technique."""

    summary = "Shrinks weights a little at every step."
    options = (Option(0, "no decay"), Option(1, "far too much"))
    trl_default = 0
    writes = frozenset({"args.weight_decay"})
    {declared}
'''
Plans = tuple[TrainingPlan, TrainingPlan]
Adding = Callable[[str], Plans]
CACHED = (catalogue, base._techniques_of, traits._untraced_paths, traits._harmless_paths)


def forget() -> None:
    for each in CACHED:
        each.cache_clear()


@pytest.fixture
def adding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Adding]:
    """Add a technique by a file alone; return the plans of SFT without and with its other choice."""

    def add(declared: str) -> Plans:
        (tmp_path / "weight_decay.py").write_text(KNOB.replace("{declared}", declared), encoding="utf-8")
        monkeypatch.setattr(autotune.techniques, "__path__", [*autotune.techniques.__path__, str(tmp_path)])
        importlib.invalidate_caches()
        forget()
        trainer, here = find_trainer("sft"), setting(machine=GPU)
        baseline = trainer.defaults(here)
        return trainer.plan(baseline, here), trainer.plan(baseline.but(weight_decay=1), here)

    yield add
    sys.modules.pop("autotune.techniques.weight_decay", None)
    forget()


def depths(plan: TrainingPlan) -> list[int]:
    return [*depths_of(plan, ["layer"] * 32)]


def test_a_technique_has_at_most_20_members() -> None:
    # Annotations without a value are members of its subclasses.
    members = {name for name in {**vars(Technique), **Technique.__annotations__} if not name.startswith("_")}
    assert len(members) <= 20, sorted(members)


def test_a_field_of_trl_takes_a_file_and_is_assumed_to_change_all_of_a_trace(adding: Adding) -> None:
    off, on = adding("")
    trainer: Trainer = find_trainer("sft")
    assert find("weight_decay", trainer.techniques).parse("1") == 1
    assert on.args["weight_decay"] == 1
    assert without_sizes(off) != without_sizes(on)
    assert library_patches_key(off) != library_patches_key(on)
    assert depths(off) == depths(on)


@pytest.mark.parametrize(
    ("impact", "shared"),
    [
        ("TraceImpact(Scope.SIZES)", {without_sizes, library_patches_key}),
        ("TraceImpact(Scope.ALLOCATOR)", {without_sizes, library_patches_key}),
        ("TraceImpact(patches_libraries=False)", {library_patches_key}),
    ],
)
def test_its_impact_decides_what_its_choices_share(adding: Adding, impact: str, shared: set[object]) -> None:
    off, on = adding(f"impact = {impact}")
    keys: tuple[Callable[[TrainingPlan], object], ...] = (without_sizes, library_patches_key)
    assert {key for key in keys if key(off) == key(on)} == shared


def test_an_effect_on_every_third_layer_is_traced_at_depths_that_show_it(adding: Adding) -> None:
    decays = 'lambda plan: PlanImpact(layer_period=3 if plan.args["weight_decay"] else 1)'
    off, on = adding(f"impact = TraceImpact(in_plan={decays})")
    assert depths(off) == [2, 3]
    assert [depth % 3 for depth in depths(on)] == [32 % 3] * 2


def test_what_needs_the_whole_model_is_traced_whole(adding: Adding) -> None:
    _, on = adding(
        'impact = TraceImpact(in_plan=lambda plan: PlanImpact(needs_all_layers="weight_decay" in plan.args))'
    )
    assert depths(on) == [32]
