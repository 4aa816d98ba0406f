"""Conformance of every trainer: traced rows have the requested shape, phases occur, and traces equal a CPU's need."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer as TransformersTrainer

from autotune.core.measurement import Schedule
from autotune.core.program import MICRO_BATCH
from autotune.core.rows.batch_geometry import Layout, Shape
from autotune.core.status import ProbeStatus
from autotune.core.timeline import Occurrence
from autotune.planning.single import trace_request
from autotune.step.job import JobContext
from autotune.step.jobs.trace import trace as trace_job
from autotune.step.run.traced_training import TraceFacts, traced_training
from autotune.step.run.virtual_trainer import TracedRows
from autotune.trainers import trainers
from autotune.trainers.base import Trainer
from autotune.virtual import trace
from autotune.virtual.recording.records import Trace
from autotune.virtual.steps.phases import inside, step_name
from tests.small import small_config, small_tokenizer
from tests.step.requests import probed_here
from tests.trainers.prepared import LIKE_GRPO, Prepare, Prepared, refused_by_trl
from tests.virtual.reference import run_on_cpu

Traces = Callable[[Prepared, Layout, Shape], Trace]

pytestmark = pytest.mark.usefixtures("small_vocabulary_tiles")
EVERY = pytest.mark.parametrize(
    "trainer",
    [
        pytest.param(item, id=item.name, marks=pytest.mark.nightly if item.name in LIKE_GRPO else ())
        for item in trainers().values()
    ],
)
SHAPES = {
    Layout.EQUAL: (Shape(1, 24), Shape(3, 40)),
    Layout.COMPLETED: (Shape(1, 24), Shape(3, 40)),
    Layout.PADDED: (Shape(2, 24), Shape(3, 40)),
    Layout.FLAT: (Shape(1, 6), Shape(1, 121)),
}
ERROR = 0.03
BRIEF = Schedule(warmup_micro_batches=0, min_micro_batches=2, max_micro_batches=2, max_seconds=60.0, saves=True)


def layouts(found: Prepared) -> list[Layout]:
    """Return the layouts that a trainer's micro-batches can have."""
    choices: list[dict[str, Any]] = [{"per_device_train_batch_size": rows} for rows in (1, 2)]
    known = {item.name for item in found.trainer.techniques}
    choices += [{"packing": "bfd", "max_length": 48}] if "packing" in known else []
    plans = [found.plan(item) for item in choices if not refused_by_trl(found.trainer, item)]
    said = {found.geometry(plan).layout for plan in plans}
    said |= {found.trainer.layout(plan, plan.rows) for plan in plans}
    # All completions may be as long as they can be.
    return sorted(said | {Layout.EQUAL} if found.trainer.generates else said)


def shapes(found: Prepared, layout: Layout) -> list[Shape]:
    """Return the shapes to trace in a layout; a third of the tokens are generated if the trainer generates any."""
    generates = found.geometry(found.plan({})).worst.generated > 0
    single = Shape(1, 30, 10 if generates else 0)
    # TRL refuses KTO of single rows with its default loss.
    alone = layout is Layout.PADDED and not found.trainer.ordered
    listed = (single, *SHAPES[layout]) if alone else SHAPES[layout]
    return [replace(shape, generated=shape.tokens // 3 if generates else 0) for shape in listed]


def steps_of(found: Prepared, layout: Layout, shape: Shape, facts: TraceFacts | None = None) -> Any:
    """Return two optimizer steps, at a shape, of the trainer's baseline; they alone if ``facts`` are to be noted."""
    plan = found.trainer.traced_plan(found.plan({}), layout, shape)
    dataset = found.reply.dataset
    trainable = dataset.trainable_tokens / dataset.documents.tokens
    rows = TracedRows(found.trainer.traced_rows(layout, shape, trainable), trainable=trainable)
    return traced_training(plan, small_config(), small_tokenizer(), rows, facts, steps_alone=facts is not None)


@pytest.fixture(scope="module")
def traced_of() -> Traces:
    """A function that returns the trace of those steps, made once for all tests."""
    known: dict[tuple[str, Layout, Shape], Trace] = {}

    def of(found: Prepared, layout: Layout, shape: Shape) -> Trace:
        key = (found.trainer.name, layout, shape)
        if key not in known:
            known[key] = trace(steps_of(found, layout, shape), target="cpu")
        return known[key]

    return of


@pytest.mark.parametrize("trainer", trainers().values(), ids=lambda item: item.name)
def test_traced_rows_make_a_micro_batch_of_the_shape_asked_for(
    trainer: Trainer, prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The loader has the micro-batches; no step on them is needed.
    monkeypatch.setattr(TransformersTrainer, "train", lambda built: built.get_train_dataloader())
    found = prepared(trainer, trainer.formats[-1].name)
    sequences = found.geometry(found.plan({})).sequences
    for layout in layouts(found):
        for shape in shapes(found, layout):
            trained = TraceFacts()
            steps_of(found, layout, shape, trained)(torch.device("cpu"))
            collated = int(shape.rows * shape.tokens) * sequences
            assert (trained.worst_rows, trained.worst_tokens) == (shape.rows * sequences, collated)
            padded = layout in (Layout.PADDED, Layout.COMPLETED)
            assert trained.tokens < collated if padded else trained.tokens == collated


# By day, tests/virtual/test_against_cpu.py compares steps of every trainer.
@pytest.mark.nightly
@EVERY
def test_a_trace_needs_what_the_real_cpu_s_allocator_hands_out(
    trainer: Trainer, prepared: Prepare, traced_of: Traces
) -> None:
    found = prepared(trainer, trainer.formats[-1].name)
    for layout in layouts(found):
        shape = shapes(found, layout)[-1]
        traced, real = traced_of(found, layout, shape), run_on_cpu(steps_of(found, layout, shape))
        for number in (0, 1):
            expected = real[step_name(number)].peak_bytes
            error = traced.phase(step_name(number)).device_peak.bytes / expected - 1
            assert abs(error) <= ERROR, f"{layout}, step {number}: {error:+.2%}"


def counted(traced: Trace, name: str, step: str) -> int:
    """Return how often a phase comes in an optimizer step."""
    return len(inside(traced, traced.phase(step), name))


@EVERY
def test_the_phases_of_its_program_come_as_often_as_it_says(
    trainer: Trainer, prepared: Prepare, traced_of: Traces
) -> None:
    found = prepared(trainer, trainer.formats[-1].name)
    layout = layouts(found)[-1]
    program = trainer.program(found.plan({}))
    traced = traced_of(found, layout, shapes(found, layout)[0])
    for name in found.adapter.methods:
        if name not in program.names:
            continue
        if name in (*program.before, *program.after):
            assert sum(phase.name == name for phase in traced.phases) == 1
        elif name in program.in_step:
            assert [counted(traced, name, step_name(number)) for number in (0, 1)] == [1, 1]
        else:
            batches = len(inside(traced, traced.phase(step_name(1)), MICRO_BATCH))
            assert counted(traced, name, step_name(1)) == batches > 0


@EVERY
def test_the_parts_of_a_traced_step_are_those_of_its_program(
    trainer: Trainer, prepared: Prepare, traced_of: Traces, tmp_path: Path
) -> None:
    found = prepared(trainer, trainer.formats[-1].name)
    layout, plan = layouts(found)[-1], found.plan({"per_device_train_batch_size": 2})
    request = trace_request(plan, layout, shapes(found, layout)[0], 2, found.setting, None)
    reply = trace_job(request, JobContext(tmp_path, time.monotonic()))
    program = trainer.program(plan)
    phases = list(dict.fromkeys(section.part.phase for section in reply.sections))
    assert phases == list(program.phases)
    # What comes once in a step is no part of a further micro-batch of it, even where TRL does it inside the first.
    parts = [section.part for section in reply.sections]
    times = {name: [part.occurrence for part in parts if part.phase == name] for name in phases}
    for name in (*program.leading, MICRO_BATCH):
        assert times.pop(name) == [Occurrence.FIRST, Occurrence.FURTHER]
    assert all(len(found) == 1 for found in times.values())
    whole = traced_of(found, layout, shapes(found, layout)[0])
    # A job traces a single micro-batch of a single step, and puts the others together from it.
    assert reply.device.bytes == pytest.approx(whole.device_peak.bytes, rel=ERROR)


@EVERY
def test_trl_s_default_is_probed(trainer: Trainer, prepared: Prepare, tmp_path: Path) -> None:
    found = prepared(trainer, trainer.formats[-1].name)
    # But for the tokens of each completion, which take most of the time and change nothing of what is tested.
    known = {item.name for item in trainer.techniques}
    plan = found.plan(dict.fromkeys(known & {"max_completion_length", "max_new_tokens"}, 16))
    said = found.geometry(plan)
    shown = probed_here(found.request(plan, BRIEF), tmp_path)
    assert (shown.status, shown.reason) == (ProbeStatus.OK, "")
    assert set(shown.peaks) == set(trainer.program(plan).phases)
    # Resident memory comes in pages, and a few may be touched between two phases.
    assert max(shown.peaks.values()) == pytest.approx(shown.peak_bytes, rel=0.01, abs=4 * mmap.PAGESIZE)
    assert shown.rows == said.rows
    assert shown.worst_tokens == said.worst.rows * said.worst.tokens * said.sequences
    assert shown.documents_per_step == pytest.approx(said.documents)
    assert shown.tokens_per_step == pytest.approx(said.tokens * said.micro_batches)
