"""An explanation shows every stage with its figures, in a console of any width."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.documents.estimate import Plan
from autotune.core.documents.explanation import Explanation, PartPeak, PartTime, Subject, TracedPoint
from autotune.core.plan import TrainingPlan
from autotune.core.program import CONSTRUCTION, MICRO_BATCH, OPTIMIZER_STEP
from autotune.core.rows.batch_geometry import BatchGeometry, Layout, Shape, Typical
from autotune.core.timeline import Occurrence, Part
from autotune.reporting.document import Facts
from autotune.reporting.plan import plan_report
from autotune.units import GIB
from tests.reporting.as_text import as_text
from tests.reporting.plans import FASTEST, LONGEST, UNKNOWN, a_plan

FIRST, FURTHER = Part(MICRO_BATCH, Occurrence.FIRST), Part(MICRO_BATCH, Occurrence.FURTHER)
UPDATE = Part(OPTIMIZER_STEP, Occurrence.ONCE)
POINTS = (
    TracedPoint(2, Shape(1, 512), -1.5, tensor_bytes=2 * GIB, allocated_bytes=3 * GIB,
                reserved_bytes=4 * GIB),
    TracedPoint(3, Shape(1, 512), 2.5, tensor_bytes=5 * GIB, allocated_bytes=6 * GIB, reserved_bytes=7 * GIB,
                assumptions={"a sum is finite": 2}),
)  # fmt: skip
SIZES = (Typical(Shape(4, 450, filled=0.8), 0.75), Typical(Shape(4, 512), 0.25))
EXPLANATION = Explanation(
    subject=Subject.FASTEST,
    candidate=LONGEST,
    training_plan=TrainingPlan("sft", {"packing": True, "max_length": 512}, {"dtype": "float32"}),
    documents=400,
    document_tokens=48_382,
    longest_tokens=629,
    geometry=BatchGeometry(Layout.FLAT, Shape(4, 512), SIZES, 1900.0, 8.2, 96, micro_batches=2),
    layers=32,
    traces=POINTS,
    peaks=(
        PartPeak(Part(CONSTRUCTION, Occurrence.BEFORE), False, {"parameter": 9 * GIB}),
        PartPeak(FURTHER, True, {"parameter": 10 * GIB, "activation": 5 * GIB}, "aten.mm.default [8, 512]"),
        PartPeak(UPDATE, False, {"parameter": 10 * GIB, "gradient": 4 * GIB}),
    ),
    times=(PartTime(FIRST, 0.5, 1), PartTime(FURTHER, 0.25, 1), PartTime(UPDATE, 0.125, 1)),
)


OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def drawn(explanation: Explanation, width: int = 100, plan: Plan | None = None) -> str:
    return as_text(plan_report(replace(plan or a_plan(), explanation=explanation), top=20), width)


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_it_fits_the_console_and_cuts_nothing_off(width: int) -> None:
    text = drawn(EXPLANATION, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text


def test_every_stage_is_shown_with_its_figures() -> None:
    text = words(drawn(EXPLANATION, 120))
    for said in (
        "How the estimate of the fastest that fits is computed",
        "args max_length=512 packing=True",
        "documents 400, 48,382 tokens; the longest sequence has 629 tokens",
        "worst micro-batch 4 rows of 512 tokens",
        "typical micro-batches 75.0 % of 4 rows of 450 tokens, 80.0 % not padding, 25.0 % of 4 rows of 512 tokens",
        "1,900 tokens without padding on average",
        "optimizer step 2 micro-batches, 8.2 documents on average, 8 requested",
        "2, 1 row of 512 tokens -1.500 2.00 GiB 3.00 GiB 4.00 GiB",
        "3, 1 row of 512 tokens +2.500 5.00 GiB 6.00 GiB 7.00 GiB",
        "Assumed in 1 of 2: a sum is finite",
        "Extrapolated to 32 layers, 4 rows of 512 tokens",
        "further micro-batch, backward <- peak 15.00 GiB parameter 10.00 GiB, activation 5.00 GiB",
        "The peak is at aten.mm.default [8, 512].",
        "tensors at the peak 19.25 GiB + fragmentation 256 MiB + context 512 MiB",
        "= needs 20.00 GiB, ±10 % to spare 4.00 GiB",
        "first micro-batch 500 ms 1 500 ms",
    ):
        assert said in text


def test_the_stages_take_the_place_of_the_candidates_and_the_notes_stay() -> None:
    text = drawn(EXPLANATION)
    assert "differences from TRL's default" not in text
    assert "Nothing was measured." in text


def test_a_trace_of_all_layers_is_not_called_extrapolated() -> None:
    text = words(drawn(replace(EXPLANATION, traces=(replace(POINTS[0], layers=32, weight=1.0),)), 120))
    assert "Traced with all 32 layers, 4 rows of 512 tokens" in text
    assert "Extrapolated" not in text


def test_moments_that_could_not_be_followed_are_said() -> None:
    text = words(drawn(replace(EXPLANATION, aligned=False)))
    assert "The traces cannot be aligned moment by moment: only their peaks were extrapolated." in text


def test_a_device_of_unknown_speed_has_no_times() -> None:
    assert FASTEST.memory is not None
    silent = replace(FASTEST, memory=replace(FASTEST.memory, step_seconds=None), tokens_per_second=None)
    text = drawn(replace(EXPLANATION, times=()), plan=a_plan(estimates=(silent,)))
    assert "Not predicted: the speed of the device is not known." in text


SUMMANDS = ("tensors at the peak", "training at rest", "+ ")
OWN = {"parameter": 16 * GIB, "rounding": GIB, "fragmentation": 5 * GIB // 2, "context": GIB // 2}


def memory_rows(breakdown: dict[str, int], vllm_bytes: int) -> list[tuple[str, str]]:
    """Return the rows of the device's memory, of a training that itself needs 20 GiB with its context of 0.5 GiB."""
    assert FASTEST.memory is not None
    memory = replace(FASTEST.memory, vllm_bytes=vllm_bytes, breakdown=breakdown)
    plan = a_plan(estimates=(replace(FASTEST, memory=memory),), explanation=EXPLANATION)
    (found,) = (block for block in plan_report(plan, top=20).blocks(Facts) if "= needs" in dict(block.pairs))
    return list(found.pairs)


@pytest.mark.parametrize(
    ("breakdown", "vllm_bytes"),
    [
        ({**OWN, "vLLM": 3 * GIB}, 3 * GIB),
        # While it generates, training holds 12 GiB less than at its own peak.
        ({"training at rest": 8 * GIB - GIB // 2, "vLLM": 20 * GIB, "context": GIB // 2}, 8 * GIB),
        (OWN, 0),
        ({"parameter": 19 * GIB, "process": GIB}, 0),
    ],
    ids=["asleep at the peak", "generating at the peak", "none", "on a CPU"],
)
def test_the_parts_of_the_need_add_up_with_vllm_or_a_process_among_them(
    breakdown: dict[str, int], vllm_bytes: int
) -> None:
    rows = memory_rows(breakdown, vllm_bytes)
    sizes = [float(size.split()[0]) for name, size in rows if name.startswith(SUMMANDS) and "GiB" in size]
    sizes += [float(size.split()[0]) / 1024 for name, size in rows if name.startswith(SUMMANDS) and "MiB" in size]
    assert dict(rows)["= needs"] == f"{sum(sizes):.2f} GiB, ±10 %"


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"use_vllm": True}, "how long vLLM generates is not known"),
        ({"deepspeed": OFFLOADED}, "a part of the step runs on the host, whose time is not known"),
        ({}, "only the largest micro-batches were traced, since it does not fit"),
    ],
    ids=["vLLM", "an optimizer on the host", "too large"],
)
def test_the_reason_why_a_known_gpu_has_no_time_is_given(args: dict[str, object], reason: str) -> None:
    assert FASTEST.memory is not None
    silent = replace(FASTEST, memory=replace(FASTEST.memory, step_seconds=None), tokens_per_second=None)
    known = replace(EXPLANATION, training_plan=TrainingPlan("sft", args))
    assert f"Not predicted: {reason}." in words(drawn(known, plan=a_plan(estimates=(silent,))))


def test_what_could_not_be_traced_ends_with_the_reason() -> None:
    unknown = replace(EXPLANATION, subject=Subject.BASELINE, candidate=UNKNOWN.candidate, traces=(), peaks=(), times=())
    text = words(drawn(unknown))
    assert "How the estimate of TRL's default, since nothing fits, is computed" in text
    assert "None: strange_attention gives no shape" in text
    assert "Memory of the device" not in text
    nothing = words(drawn(unknown, plan=a_plan(estimates=(UNKNOWN,), baseline=UNKNOWN)))
    assert "How the estimate of TRL's default, since nothing could be predicted, is computed" in nothing
