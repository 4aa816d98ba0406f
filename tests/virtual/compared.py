"""Compares a trace for the CPU with the allocations of PyTorch's CPU allocator in the same training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autotune.core.program import CONSTRUCTION, EVALUATE, MICRO_BATCH, StepProgram
from autotune.trainers.prompts import GENERATION
from autotune.virtual import trace
from autotune.virtual.recording.records import Trace
from autotune.virtual.steps.phases import inside, step_name
from tests.virtual.reference import run_on_cpu

# Of the peak of each phase, and of all that is allocated in a step without generation.
PEAK_ERROR, SUM_ERROR = 0.01, 0.03


def assert_as_on_cpu(
    run: Callable[[torch.device], Any], program: StepProgram, *, sum_error: float = SUM_ERROR
) -> Trace:
    """Trace a training for the CPU, run it there, and compare the peaks of all phases; return the trace."""
    in_order = (step_name(0), step_name(1))
    names = {*in_order, *program.names} - {CONSTRUCTION}

    traced, real = trace(run, target="cpu"), run_on_cpu(run, phases=tuple(names))

    first = {phase.name: phase for phase in reversed(traced.phases) if phase.name in names}
    assert first.keys() == real.keys()
    assert first.keys() >= {*in_order, *program.before, *program.in_step, *program.leading, MICRO_BATCH, *program.after}
    for name, expected in real.items():
        found = first[name].device_peak.bytes
        assert found == pytest.approx(expected.peak_bytes, rel=PEAK_ERROR), name
    # A trace runs few of the steps that generate tokens.
    for name in () if GENERATION in names else in_order:
        events = traced.events[first[name].first_event : first[name].end_event]
        asked = sum(event.change_bytes for event in events if event.change_bytes > 0)
        really_asked = sum(change for change, _, _ in real[name].events if change > 0)
        assert asked == pytest.approx(really_asked, rel=sum_error), name
    # Both come after an update, so gradients are freed, and weights and the optimizer's state are held.
    for name in program.after:
        assert first[name].device_peak.bytes >= first[name].start_bytes > 0
    if GENERATION in names and EVALUATE in names:
        assert inside(traced, first[EVALUATE], GENERATION)
    return traced
