"""The time of a step: the roofline of every operator, and launches and copies in parallel with the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autotune.core.gpu import AchievedRates, Gpu, GpuSpeeds
from autotune.core.plan import Launch
from autotune.core.step_time import Caller, Pace
from autotune.errors import InputError
from autotune.inspection.gpus import find_gpu, gpus
from autotune.units import GIB
from autotune.virtual.cost.roofline import Access, Kind, Work, operator_seconds, step_seconds
from autotune.virtual.operators.callers import caller_of

# Round figures, so that the expected times can be read off: 1e12 bytes/s, 100e12 in bfloat16, 10e12 in float32.
SPEEDS = GpuSpeeds(bandwidth=1e12, fp32=1e13, fp16=1e14, bf16=1e14, tf32=5e13, pcie=1e10, nvlink=None, source="")
ROUND = Gpu("round", 80 * GIB, "given", "", GIB, speeds=SPEEDS)
NO_LAUNCH = Pace(launch_seconds=0.0)
SECOND_OF_MATMUL = Work(Kind.MATMUL, "bfloat16", flops=10**14)
SECOND_TO_HOST = Work(Kind.TO_HOST, "bfloat16", bytes_read=10**10, bytes_written=10**10, on_side_stream=True)
SECOND_TO_DEVICE = Work(Kind.TO_DEVICE, "bfloat16", bytes_read=10**10, bytes_written=10**10, on_side_stream=True)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work(Kind.MATMUL, "bfloat16", 10**14, 10**9, 10**9), 1.0),
        (Work(Kind.MATMUL, "float32", 10**14, 10**9, 10**9), 10.0),
        (Work(Kind.MATMUL, "bfloat16", 10**9, 10**12, 10**12), 2.0),
        (Work(Kind.ATTENTION, "float16", 3 * 10**14, 10**9, 10**9), 3.0),
        (Work(Kind.ELEMENTWISE, "bfloat16", 10**9, 10**12, 5 * 10**11), 1.5),
        (SECOND_TO_HOST, 1.0),
        (Work(Kind.NOTHING), 0.0),
    ],
    ids=["compute-bound", "float32", "memory-bound", "attention", "elementwise", "copy", "view"],
)
def test_an_operator_takes_the_longer_of_computing_and_moving_bytes(work: Work, seconds: float) -> None:
    assert operator_seconds(work, SPEEDS, Pace()) == pytest.approx(seconds)


# Half of the peak for products, a quarter for long attention, a tenth of the bandwidth where memory is gathered.
ACHIEVED = replace(
    SPEEDS,
    achieved=AchievedRates(
        half=0.5,
        kernel_seconds=0.25,
        attention=0.5,
        attention_kernels=(("cudnn", 0.8),),
        backward_attention=0.5,
        attention_tokens=1000,
        gather=0.1,
        batched=0.5,
    ),
)


CLASSES = {
    "product": (Work(Kind.MATMUL, "bfloat16", 10**14), 2.25),
    "other type": (Work(Kind.MATMUL, "float32", 10**13), 1.25),
    "memory-bound": (Work(Kind.MATMUL, "bfloat16", 10**12, 10**12), 1.25),
    "batched": (Work(Kind.MATMUL, "bfloat16", 10**12, 10**12, access=Access.BATCHED), 2.25),
    "attention": (Work(Kind.ATTENTION, "bfloat16", 10**14), 2.25),
    "like it": (Work(Kind.ATTENTION, "bfloat16", 10**14, kernel="efficient"), 2.25),
    "faster": (Work(Kind.ATTENTION, "bfloat16", 10**14, kernel="cudnn"), 1.5),
    "faster backward": (Work(Kind.ATTENTION, "bfloat16", 10**14, kernel="cudnn", backward=True), 2.75),
    "short rows": (Work(Kind.ATTENTION, "bfloat16", 10**14, length=1000), 4.25),
    "backward": (Work(Kind.ATTENTION, "bfloat16", 10**14, length=1000, backward=True), 8.25),
    "pointwise": (Work(Kind.ELEMENTWISE, "bfloat16", 0, 10**12), 1.0),
    "gather": (Work(Kind.ELEMENTWISE, "bfloat16", 0, 10**12, access=Access.GATHER), 10.0),
}


@pytest.mark.parametrize(("work", "seconds"), CLASSES.values(), ids=CLASSES)
def test_an_operator_takes_as_long_as_its_class_achieves(work: Work, seconds: float) -> None:
    assert operator_seconds(work, ACHIEVED, Pace()) == pytest.approx(seconds)


# A cache of 1e9 bytes that is five times as fast as the memory.
CACHED = replace(SPEEDS, achieved=AchievedRates(softmax=0.5, cache_bytes=1e9, cache_bandwidth=5e12))
READ = 4 * 10**8


@pytest.mark.parametrize(
    ("reused", "access", "seconds"),
    [
        ((), Access.POINTWISE, 8e-4),
        (((READ, 0), (READ, 0)), Access.POINTWISE, 1.6e-4),
        (((READ, 0), (READ, 0)), Access.SOFTMAX, 3.2e-4),
        (((READ, 0),), Access.POINTWISE, 4e-4),
        (((READ, 2 * 10**8), (READ, 0)), Access.POINTWISE, 1.6e-4),
        (((READ, 3 * 10**8), (READ, 0)), Access.POINTWISE, 4e-4),
    ],
    ids=["not held", "held", "in a slower pass", "result in the memory", "not long since", "long since"],
)
def test_tensors_that_the_cache_holds_pass_at_its_rate(
    reused: tuple[tuple[int, int], ...], access: Access, seconds: float
) -> None:
    work = Work(Kind.ELEMENTWISE, "bfloat16", 0, READ, READ, reused=reused, access=access)
    assert operator_seconds(work, CACHED, Pace()) == pytest.approx(seconds)
    if access is Access.POINTWISE:
        assert operator_seconds(replace(work, kind=Kind.MATMUL), CACHED, Pace()) == pytest.approx(seconds)


def test_tensors_that_the_cache_cannot_hold_pass_at_the_rate_of_the_memory() -> None:
    work = Work(Kind.ELEMENTWISE, "bfloat16", 0, 10**9, 10**9, reused=((10**9, 0), (10**9, 0)))
    assert operator_seconds(work, CACHED, Pace()) == pytest.approx(2e-3)


def test_a_small_operator_that_memory_bounds_takes_its_fixed_time() -> None:
    speeds = replace(SPEEDS, achieved=AchievedRates(pass_seconds=2e-6))
    work = Work(Kind.ELEMENTWISE, "bfloat16", 1, 2, 2)
    assert operator_seconds(work, speeds, Pace()) == pytest.approx(2e-6, rel=1e-3)


def test_operators_take_longer_within_a_training_than_alone_but_copies_do_not() -> None:
    sustained = replace(SPEEDS, achieved=AchievedRates(sustained=1.5))
    assert operator_seconds(SECOND_OF_MATMUL, sustained, Pace()) == pytest.approx(1.5)
    assert operator_seconds(SECOND_TO_HOST, sustained, Pace()) == pytest.approx(1.0)


@pytest.mark.parametrize(("gpus_of_a_machine", "seconds"), [(2, 2.0), (4, 1.25), (8, 1.25)])
def test_links_are_reached_in_the_share_of_their_number_of_gpus(gpus_of_a_machine: int, seconds: float) -> None:
    linked = replace(SPEEDS, achieved=AchievedRates(links=((2, 0.5), (4, 0.8))))
    work = Work(Kind.COMMUNICATION, bytes_written=10**10)
    launch = Launch(processes=gpus_of_a_machine)
    assert operator_seconds(work, linked, Pace(), launch) == pytest.approx(seconds)


def test_every_gpu_whose_speed_is_known_has_rates_below_its_peaks_with_their_source() -> None:
    for gpu in gpus():
        if gpu.speeds is not None:
            rates = gpu.speeds.achieved
            shares = [rates.bandwidth_share(access) for access in Access] + [rates.half, rates.single, rates.attention]
            shares += [share for _, share in (*rates.attention_kernels, *rates.links)]
            assert all(0 < share < 1 for share in shares), gpu.name
            assert not rates.cache_bytes or rates.cache_bandwidth > rates.pointwise * gpu.speeds.bandwidth, gpu.name
            assert rates.source, gpu.name


@pytest.mark.parametrize("name", ["A100-80GB", "H100-SXM", "H200"])
@pytest.mark.parametrize("kernel", ["", "cudnn", "efficient"])
def test_a_query_on_long_keys_takes_the_time_of_reading_them(name: str, kernel: str) -> None:
    speeds, (batch, heads, keys, width) = find_gpu(name).speeds, (64, 28, 4000, 128)
    assert speeds is not None
    size = 2 * batch * heads * keys * width
    work = Work(Kind.ATTENTION, "bfloat16", 2 * size, 2 * size, kernel=kernel, length=keys)
    reading = 2 * size / speeds.bandwidth
    assert reading < operator_seconds(work, speeds, Pace()) < 1.5 * reading


def test_float32_products_are_faster_where_tf32_is_allowed() -> None:
    work = Work(Kind.MATMUL, "float32", 10**14)
    assert operator_seconds(work, SPEEDS, Pace(allow_tf32=True)) == pytest.approx(2.0)


def test_long_operators_hide_their_launches() -> None:
    time = step_seconds([SECOND_OF_MATMUL] * 3, ROUND, Pace(launch_seconds=0.1))
    assert time.seconds == pytest.approx(3.1)
    assert time.launch_seconds == pytest.approx(0.3)


def test_short_operators_are_bound_by_their_launches() -> None:
    time = step_seconds([Work(Kind.ELEMENTWISE, "bfloat16", 1, 2, 2)] * 1000, ROUND, Pace(launch_seconds=1e-5))
    assert time.seconds == pytest.approx(1e-2, rel=1e-3)


def test_the_time_of_a_launch_depends_on_its_caller() -> None:
    pace = Pace(launch_seconds=1.0, plain=0.5, library=5.0)
    short = Work(Kind.ELEMENTWISE, "bfloat16", 1, 2, 2)
    works = [short, replace(short, caller=Caller.PLAIN, times=4), replace(short, caller=Caller.LIBRARY)]
    time = step_seconds(works, ROUND, pace)
    assert time.launch_seconds == pytest.approx(8.0)
    assert time.seconds == pytest.approx(8.0, rel=1e-3)


def test_kernels_of_an_optimizer_and_of_quantised_scales_are_launched_faster_than_a_4_bit_modules() -> None:
    pytest.importorskip("bitsandbytes")
    ops = torch.ops.bitsandbytes
    kernels = ops.optimizer_update_8bit_blockwise, ops.optimizer_update_32bit, ops.dequantize_blockwise
    assert {caller_of(kernel.default, in_backward=False) for kernel in kernels} == {Caller.KERNEL}
    assert caller_of(torch.ops.bitsandbytes.dequantize_4bit.default, in_backward=False) is Caller.LIBRARY
    assert Pace().host_seconds(Caller.KERNEL) < Pace().host_seconds(Caller.LIBRARY)


def test_looking_at_a_value_makes_the_host_wait_for_the_device() -> None:
    pace = Pace(launch_seconds=0.25)
    works = [SECOND_OF_MATMUL, Work(Kind.SYNCHRONIZE), SECOND_OF_MATMUL]
    assert step_seconds(works, ROUND, pace).seconds == pytest.approx(2.5)


def test_a_copy_that_is_not_waited_for_takes_place_beside_the_device() -> None:
    works = [SECOND_OF_MATMUL, SECOND_TO_HOST, SECOND_OF_MATMUL, SECOND_TO_HOST, SECOND_OF_MATMUL]
    time = step_seconds(works, ROUND, NO_LAUNCH)
    assert (time.seconds, time.copy_seconds) == (3.0, 2.0)


def test_a_copy_on_the_stream_of_the_operators_takes_place_between_them() -> None:
    for copy in (SECOND_TO_HOST, SECOND_TO_DEVICE):
        works = [SECOND_OF_MATMUL, replace(copy, on_side_stream=False), SECOND_OF_MATMUL]
        assert step_seconds(works, ROUND, NO_LAUNCH).seconds == 3.0


def test_what_has_not_been_computed_cannot_be_copied_yet() -> None:
    assert step_seconds([SECOND_OF_MATMUL, SECOND_TO_HOST], ROUND, NO_LAUNCH).seconds == 2.0


def test_copies_are_on_one_stream_for_both_directions() -> None:
    assert step_seconds([SECOND_TO_HOST, SECOND_TO_DEVICE], ROUND, NO_LAUNCH).seconds == 2.0
    assert step_seconds([SECOND_TO_DEVICE, SECOND_TO_DEVICE], ROUND, NO_LAUNCH).seconds == 2.0


def test_the_device_waits_for_what_is_copied_to_it() -> None:
    assert step_seconds([SECOND_TO_DEVICE, SECOND_OF_MATMUL], ROUND, NO_LAUNCH).seconds == 2.0


def test_the_device_waits_for_a_copy_to_the_host_that_five_others_follow() -> None:
    beside = [SECOND_OF_MATMUL, *[SECOND_TO_HOST] * 5, SECOND_OF_MATMUL]
    behind = [SECOND_OF_MATMUL, *[SECOND_TO_HOST] * 6, *[SECOND_OF_MATMUL] * 6]
    assert step_seconds(beside, ROUND, NO_LAUNCH).seconds == 6.0
    assert step_seconds(behind, ROUND, NO_LAUNCH).seconds == 8.0


def test_more_copies_than_the_device_has_work_for_bound_the_step() -> None:
    works = [SECOND_OF_MATMUL, *[SECOND_TO_HOST] * 4, SECOND_OF_MATMUL]
    assert step_seconds(works, ROUND, NO_LAUNCH).seconds == 5.0


def test_a_copy_that_the_host_waits_for_stops_everything() -> None:
    waiting = Work(Kind.TO_DEVICE, "bfloat16", 0, 10**10, 10**10, waits=True)
    assert step_seconds([SECOND_OF_MATMUL, waiting, SECOND_OF_MATMUL], ROUND, NO_LAUNCH).seconds == 3.0


def test_no_operators_take_no_time() -> None:
    assert step_seconds([], ROUND).seconds == 0.0


def test_a_gpu_of_unknown_speed_has_no_predicted_time() -> None:
    with pytest.raises(InputError, match="24GiB"):
        step_seconds([SECOND_OF_MATMUL], find_gpu("24GiB"))


@pytest.mark.parametrize("gpu", [gpu for gpu in gpus() if gpu.speeds], ids=lambda gpu: gpu.name)
def test_twice_the_work_never_takes_less_time(gpu: Gpu) -> None:
    works = [SECOND_OF_MATMUL, SECOND_TO_HOST, Work(Kind.ELEMENTWISE, "float32", 10**9, 10**9, 10**9)]
    assert 0 < step_seconds(works, gpu).seconds < step_seconds(works * 2, gpu).seconds


SECOND_OF_SENDING = Work(Kind.COMMUNICATION, bytes_read=10**10, bytes_written=10**10)


def test_ranks_send_over_nvlink_where_there_is_one() -> None:
    linked = replace(SPEEDS, nvlink=1e11)
    assert operator_seconds(SECOND_OF_SENDING, SPEEDS, Pace()) == 1.0
    assert operator_seconds(SECOND_OF_SENDING, linked, Pace()) == 0.1


def test_what_is_sent_on_the_default_stream_delays_what_follows_and_else_overlaps_with_it() -> None:
    waiting = replace(SECOND_OF_SENDING, waits=True)
    apart, behind = (
        step_seconds([SECOND_OF_MATMUL, sending, SECOND_OF_MATMUL], ROUND, NO_LAUNCH)
        for sending in (SECOND_OF_SENDING, waiting)
    )
    assert (apart.seconds, behind.seconds) == (2.0, 3.0)
    assert apart.communication_seconds == behind.communication_seconds == 1.0
    # One message after another, as they share the links.
    assert step_seconds([SECOND_OF_SENDING] * 3, ROUND, NO_LAUNCH).seconds == 3.0
