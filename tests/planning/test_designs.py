"""Which sizes are traced themselves, and how traces are shared out among combinations that do not foretell others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.batch_geometry import BatchGeometry, Layout, Shape, Typical
from autotune.core.candidate import Candidate, Choice
from autotune.core.estimate import Origin
from autotune.core.machine import Machine
from autotune.inspection.gpus import find_gpu
from autotune.planning.additive.designs import Designs
from autotune.planning.additive.group import Group
from autotune.planning.candidates import legal_candidates
from autotune.planning.extrapolation.anchors import anchors
from autotune.planning.extrapolation.fit import Fit
from autotune.planning.extrapolation.shape import Basis
from autotune.planning.planner import Planner
from autotune.planning.target import Accelerator
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.space import Wishes
from autotune.units import GIB
from tests.planning.stand_in import AnalyticTracer
from tests.settings import GPU, problem, setting, workload

GPUS = Machine(replace(GPU.hardware, processes=4), {**GPU.packages, "deepspeed": "0.19.8"})


def geometries(*shapes: Shape, layout: Layout = Layout.EQUAL) -> list[BatchGeometry]:
    return [BatchGeometry(layout, shape, (Typical(shape),), 1.0, 2, 16.0, 100) for shape in shapes]


def test_as_few_sizes_as_would_be_traced_for_others_are_traced_themselves() -> None:
    one, two = Shape(4, 2048), Shape(8, 2048)

    assert anchors(Layout.EQUAL, geometries(one)).shapes == (one,)
    chosen = anchors(Layout.EQUAL, geometries(two, one))
    assert (chosen.basis, chosen.shapes, chosen.beyond) == (Basis.ROWS, (one, two), None)
    assert chosen.sums(two) == {one: pytest.approx(0), two: pytest.approx(1)}


def test_nothing_is_said_of_sizes_beside_them() -> None:
    chosen = anchors(Layout.EQUAL, geometries(Shape(4, 2048)))

    assert chosen.covers(Shape(4, 2048))
    assert not chosen.covers(Shape(8, 2048))
    assert anchors(Layout.EQUAL, geometries(*(Shape(rows, 2048) for rows in (1, 2, 4)))).covers(Shape(8, 2048))


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(geometries(Shape(1, 2048), Shape(2, 1024)), id="lengths"),
        pytest.param(geometries(Shape(1, 2048.5)), id="mean"),
        pytest.param(geometries(Shape(1, 2048), layout=Layout.FLAT), id="flat"),
    ],
)
def test_sizes_of_other_kinds_are_extrapolated_to(found: list[BatchGeometry]) -> None:
    assert not anchors(found[0].layout, found).alone


def test_each_kind_of_step_gets_its_share_of_the_traces_and_its_own_base() -> None:
    choices = [Candidate({"liger": liger, "optimizer": name}) for liger in ("off", "on") for name in "abcdef"]
    groups = [Group(candidate, Layout.EQUAL, steps) for candidate in choices for steps in (1, 2)]
    base = groups[1]
    fits: dict[Group, Fit] = {}
    asked = []
    # No figures are needed to show each level once.
    for batch in Designs(groups, base, []).wanted(fits, lambda _: 0, len(groups)):
        asked.append(batch)
        fits |= dict.fromkeys(batch)  # type: ignore[arg-type]  # only which are traced is looked at

    assert asked[0][0] == base
    assert [{group.micro_batches for group in batch} for batch in asked] == [{2}, {1}]
    assert [len(batch) for batch in asked] == [12, 12]


def test_a_step_of_one_micro_batch_is_not_composed_of_steps_of_several(tmp_path: Path) -> None:
    where = setting(machine=GPUS, of=workload(lengths={1024: 64}), global_batch_size=16)
    fixed: dict[str, Choice] = {"max_length": 1024, "packing": "none", "attention": "sdpa", "padding_free": "off",
             "optimizer": "adamw_torch", "pad_to_multiple_of": "none", "activation_offloading": "off",
             "precision": "float32+bf16"}  # fmt: skip
    of = problem(where, Wishes(fixed))
    candidates = legal_candidates(of)
    planner = Planner(
        of,
        Accelerator(find_gpu("H100-80GB"), 70 * GIB),
        Traces(AnalyticTracer(), Cache(tmp_path), "model", {}),
        ("full",) * 16,
        candidates,
    )
    planner.explore(12)

    composed = [found.candidate for found in planner.ranked() if found.origin is Origin.COMPOSED]
    assert composed
    for candidate in composed:
        steps = {term.group.micro_batches for term in planner.figures.basis(candidate).terms}
        assert steps == {planner.group(candidate).micro_batches}
