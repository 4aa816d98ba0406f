"""Classification of exceptions of a candidate or of the disk: real ones if this machine can raise them."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from datasets.config import DATASET_STATE_JSON_FILENAME

from autotune.core.jobs.exchange import read_reply, write_request
from autotune.core.jobs.protocol import Failure, InputProblem, ProbeRequest
from autotune.core.measurement import OutOfMemory
from autotune.core.program import CONSTRUCTION
from autotune.core.status import ProbeStatus
from autotune.core.workload import ModelSource
from autotune.errors import InputError
from autotune.step.child import execute
from autotune.step.job import JobContext
from autotune.step.jobs.probe import _failed_measurement, classify_error, probe
from autotune.step.run.meters import CpuMeter, CudaMeter
from autotune.step.run.progress import Progress
from autotune.units import GIB, MIB
from tests.small import write_small_model
from tests.step.requests import BRIEF, plan


def kind(
    error: Exception, *, began: bool = False, limit_bytes: int | None = None, headroom_bytes: int | None = None
) -> ProbeStatus:
    return classify_error(
        error, began_training=began, device="cpu", limit_bytes=limit_bytes, headroom_bytes=headroom_bytes
    ).status


def test_a_full_disk_in_a_training_is_no_result_of_its_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setitem(probe.__globals__, "train", full)
    model = ModelSource(str(write_small_model(tmp_path / "model", weights=False)))
    (tmp_path / DATASET_STATE_JSON_FILENAME).touch()
    asked = ProbeRequest(plan(), model, "cpu", str(tmp_path), BRIEF)
    with pytest.raises(OSError, match="No space left"):
        probe(asked, JobContext(tmp_path, 0.0))


def test_a_tensor_that_does_not_fit_is_out_of_memory_with_its_size() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**52, dtype=torch.uint8)
    verdict = classify_error(raised.value, began_training=True, device="cpu")
    assert verdict.status is ProbeStatus.OUT_OF_MEMORY
    assert (verdict.reason, verdict.requested_bytes) == ("4194304 GiB could not be allocated", 2**52)


def test_python_objects_that_do_not_fit_are_out_of_memory() -> None:
    with pytest.raises(MemoryError) as raised:
        bytearray(2**62)
    assert kind(raised.value) is ProbeStatus.OUT_OF_MEMORY


def test_cudas_message_tells_the_size() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of …")
    verdict = classify_error(error, began_training=False, device="cuda")
    assert (verdict.status, verdict.requested_bytes) == (ProbeStatus.OUT_OF_MEMORY, int(1.5 * GIB))


def test_an_allocation_on_the_host_that_fails_beside_a_gpu_is_none_of_the_gpu() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**52, dtype=torch.uint8)
    for error in (raised.value, MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")):
        verdict = classify_error(error, began_training=True, device="cuda")
        assert (verdict.status, verdict.requested_bytes) == (ProbeStatus.HOST_OUT_OF_MEMORY, None)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("the CUDA context alone holds 500 MiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc: cudaErrorMemoryAllocation: out of memory"),
    ],
)
def test_what_cuda_could_not_allocate_is_of_the_gpu(error: Exception) -> None:
    assert classify_error(error, began_training=True, device="cuda").status is ProbeStatus.OUT_OF_MEMORY


def test_a_probe_beside_a_gpu_says_in_which_phase_the_hosts_memory_ran_out_and_nothing_of_the_gpus() -> None:
    model, meter = ModelSource("small", "random"), CpuMeter()
    request = ProbeRequest(plan(), model, "cuda", "tokenized", BRIEF, limit_bytes=GIB)
    shown = _failed_measurement(MemoryError(), request, Progress(BRIEF, meter), meter, 0.0)
    assert (shown.status, shown.reason) == (ProbeStatus.HOST_OUT_OF_MEMORY, "in construction: MemoryError")
    assert shown.out_of_memory == OutOfMemory(CONSTRUCTION, requested_bytes=None, used_bytes=None, limit_bytes=None)


def test_a_failed_system_call_for_memory_is_out_of_memory() -> None:
    assert kind(OSError(errno.ENOMEM, "Cannot allocate memory")) is ProbeStatus.OUT_OF_MEMORY


def test_memory_that_ran_out_behind_another_exception_is_found() -> None:
    def load() -> None:
        try:
            raise MemoryError
        except MemoryError as cause:
            raise ValueError("the dataset could not be made") from cause

    with pytest.raises(ValueError, match="could not be made") as raised:
        load()
    assert kind(raised.value) is ProbeStatus.OUT_OF_MEMORY


@pytest.mark.parametrize("message", ["could not create a primitive", "can't start new thread"])
def test_an_ambiguous_error_is_out_of_memory_only_at_an_enforced_limit(message: str) -> None:
    error = RuntimeError(message)
    assert kind(error, limit_bytes=GIB, headroom_bytes=MIB) is ProbeStatus.OUT_OF_MEMORY
    assert kind(error, limit_bytes=GIB, headroom_bytes=100 * MIB) is ProbeStatus.OUT_OF_MEMORY
    assert kind(error, limit_bytes=GIB, headroom_bytes=500 * MIB) is ProbeStatus.CRASHED
    assert kind(error) is ProbeStatus.CRASHED


def test_a_refusal_comes_before_the_first_step_is_done() -> None:
    refusals: list[Exception] = [ValueError("no"), NotImplementedError("not yet"), ImportError("absent")]
    for error in refusals:
        assert kind(error) is ProbeStatus.UNSUPPORTED
        assert kind(error, began=True) is ProbeStatus.CRASHED
    assert kind(RuntimeError("broken")) is ProbeStatus.CRASHED


def test_a_reason_is_the_first_lines_and_not_a_page() -> None:
    verdict = classify_error(
        ValueError("\n".join(f"line {i} " + "x" * 200 for i in range(50))), began_training=True, device="cpu"
    )
    assert verdict.reason.startswith("ValueError: line 0 ")
    assert len(verdict.reason) <= 400
    assert classify_error(KeyError(), began_training=True, device="cpu").reason == "KeyError"


def test_these_tests_ran_without_a_limit() -> None:
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY


FULL = os.strerror(errno.ENOSPC)


@dataclass(frozen=True)
class Nothing:
    """A request, and a reply."""


def reply_after(error: Exception, folder: Path) -> Nothing | InputProblem | Failure:
    """Run a job that raises an error, and return its reply."""

    def fail(request: Nothing, context: JobContext) -> Nothing:
        raise error

    write_request(folder, "fail", Nothing())
    execute(folder, {"fail": fail}, {})
    return read_reply(folder, Nothing)


def wrapped(cause: Exception) -> Exception:
    """Return an error of a library that another one caused."""
    error = ValueError("the rows cannot be saved")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, FULL),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        OSError(errno.EFBIG, os.strerror(errno.EFBIG)),
        # As tokenizers and safetensors raise it.
        Exception(f"{FULL} (os error 28)"),
        wrapped(OSError(errno.ENOSPC, FULL)),
    ],
    ids=repr,
)
def test_a_full_disk_is_for_the_user_to_mend(error: Exception, tmp_path: Path) -> None:
    reply = reply_after(error, tmp_path)
    assert isinstance(reply, InputProblem)
    assert "no space left" in reply.message
    assert str(tmp_path) in reply.hint


def test_another_error_of_the_disk_is_a_failure(tmp_path: Path) -> None:
    reply = reply_after(OSError(errno.EIO, os.strerror(errno.EIO)), tmp_path)
    assert isinstance(reply, Failure)


def test_shared_memory_does_not_count_on_a_cpu() -> None:
    meter = CpuMeter()
    with mmap.mmap(-1, 64 * MIB) as shared:
        shared[:: mmap.PAGESIZE] = bytes(len(shared) // mmap.PAGESIZE)
        held_bytes = meter.lap()
    assert 0 <= held_bytes < 32 * MIB


def test_a_kernel_that_counts_no_kinds_of_memory_is_named_before_a_probe_has_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As gVisor has it (pkg/sentry/fsimpl/proc/task_files.go).
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmSize:\t900 kB\nVmRSS:\t800 kB\nVmData:\t700 kB\nThreads:\t1\n")
    monkeypatch.setattr("autotune.step.run.meters._STATUS", status)
    with pytest.raises(InputError, match=f"{status} has no RssAnon, RssFile, RssShmem, VmHWM"):
        CpuMeter()


@pytest.mark.parametrize(
    ("others_bytes", "grown"),
    # The limit leaves room for 4 GiB.
    [
        (GIB, ""),
        (3 * GIB, ""),
        (9 * GIB, " outside this probe's allocator grew from 1.00 GiB to 9.00 GiB, which leaves"),
    ],
)
def test_memory_that_others_took_during_a_probe_is_named(
    others_bytes: int, grown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = CudaMeter.__new__(CudaMeter)
    meter._total_bytes, meter._others_before_bytes = 24 * GIB, GIB
    monkeypatch.setattr(CudaMeter, "_others_bytes", lambda _: others_bytes)
    found = meter.other_causes(20 * GIB)
    assert grown in found
    assert bool(found) == bool(grown)
