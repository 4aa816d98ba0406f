"""Two steps composed from a trace of one micro-batch equal a trace of two steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from autotune.core.plan import TrainingPlan
from autotune.core.program import MICRO_BATCH, OPTIMIZER_STEP, StepProgram
from autotune.core.timeline import Occurrence, Section
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import TracedRows
from autotune.virtual import trace
from autotune.virtual.engine.tracing import _running
from autotune.virtual.recording.records import Place, Trace
from autotune.virtual.steps.phases import micro_batches, step_name
from autotune.virtual.steps.sections import sections
from autotune.virtual.steps.steady import steady
from tests.small import small_tokenizer
from tests.virtual.models import config_of

# Sums and norms that replace those of the step before, and the rows of micro-batches that are read together.
SMALL_BYTES = 4096
KEPT = "an activation of the first call stays allocated"
CASES: dict[str, dict[str, object]] = {
    "stored": {},
    "checkpointed and packed": {"gradient_checkpointing": True, "packing": True},
    "a single micro-batch": {"gradient_accumulation_steps": 1},
    "adafactor": {"optim": "adafactor"},
    KEPT: {},
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.nightly) if name == "adafactor" else name for name in CASES],
)
def traces(request: pytest.FixtureRequest) -> tuple[Trace, Trace]:
    """A trace of two steps of two micro-batches, and one of a single one with the others added."""
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 32, "bf16": False}
    args = {**given, "gradient_checkpointing": False, **CASES[request.param]}

    def traced(*, once: bool) -> Trace:
        rows = TracedRows([(16,)] * 4, once=once)
        steps = traced_training(TrainingPlan("sft", args=args), config_of("llama"), small_tokenizer(), rows)
        with _first_kept() if request.param == KEPT else nullcontext():
            return trace(steps, target="cpu")

    several = args["gradient_accumulation_steps"] != 1
    return traced(once=False), steady(traced(once=True), step_name(0), step_name(1), further=several)


@contextmanager
def _first_kept() -> Iterator[None]:
    """Keep what the first feed-forward layer of a trace is given, as Dynamo keeps what it compiles a function for."""
    forward = LlamaMLP.forward
    kept: list[bool] = []

    def keeping(layer: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(True)
            _running[-1][1].keep(x)
        return forward(layer, x)

    with mock.patch.object(LlamaMLP, "forward", keeping):
        yield


def test_memory_takes_the_same_course_through_the_step(traces: tuple[Trace, Trace]) -> None:
    real, added = (_sections(found) for found in traces)
    assert [section.part for section in added] == [section.part for section in real]
    for expected, found in zip(real, added, strict=True):
        if expected.part.occurrence is not Occurrence.FURTHER:
            assert found.moments == expected.moments
        # Adding up losses makes a moment or two more.
        assert len(found.moments) == pytest.approx(len(expected.moments), abs=3)
        for in_backward in (False, True):
            assert abs(_highest(found, in_backward) - _highest(expected, in_backward)) <= SMALL_BYTES
        assert {name for name, levels in found.levels.items() if max(levels) > SMALL_BYTES} == {
            name for name, levels in expected.levels.items() if max(levels) > SMALL_BYTES
        }


def test_peaks_and_what_is_left_in_the_end_are_the_same(traces: tuple[Trace, Trace]) -> None:
    real, added = traces
    assert abs(added.device_peak.bytes - real.device_peak.bytes) <= SMALL_BYTES
    assert abs(_left(added) - _left(real)) <= SMALL_BYTES
    for number in (0, 1):
        expected, found = (item.phase(step_name(number)) for item in traces)
        assert abs(found.device_peak.bytes - expected.device_peak.bytes) <= SMALL_BYTES


def test_no_storage_is_freed_twice(traces: tuple[Trace, Trace]) -> None:
    held: dict[int, int] = {}
    for event in traces[1].events:
        held[event.storage] = held.get(event.storage, 0) + event.change_bytes
        assert held[event.storage] >= 0


def test_the_added_step_does_the_same_work(traces: tuple[Trace, Trace]) -> None:
    real, added = (
        list(found.operators[step.first_operator : step.end_operator])
        for found in traces
        for step in [found.phase(step_name(1))]
    )
    products = [[operator.name for operator in found if "mm" in operator.name] for found in (real, added)]
    moved = [
        sum(operator.work.bytes_read + operator.work.bytes_written for operator in found) for found in (real, added)
    ]
    assert products[0] == products[1] != []
    assert moved[1] == pytest.approx(moved[0], rel=0.01)


def test_each_step_has_its_micro_batches(traces: tuple[Trace, Trace]) -> None:
    real, added = traces
    for number in (0, 1):
        expected = micro_batches(real, real.phase(step_name(number)))
        found = micro_batches(added, added.phase(step_name(number)))
        assert len(found) == len(expected)
        assert all(batch.end_operator > batch.first_operator for batch in found)


def _highest(section: Section, in_backward: bool) -> int:
    moments = slice(section.backward, None) if in_backward else slice(0, section.backward)
    return max(section.totals[moments], default=0)


def _sections(found: Trace) -> list[Section]:
    return [section for section, _ in sections(found, found.phase(step_name(1)), StepProgram())]


def _left(found: Trace) -> int:
    return sum(event.change_bytes for event in found.events if event.place is Place.DEVICE)


def test_parts_of_a_step_are_told_in_their_order(traces: tuple[Trace, Trace]) -> None:
    found = [section.part for section in _sections(traces[1])]
    assert [part.phase for part in found[1:]] == [MICRO_BATCH] * (len(found) - 2) + [OPTIMIZER_STEP]
    assert found[0].occurrence is Occurrence.BEFORE
