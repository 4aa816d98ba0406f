"""The memory of a null GPU: the size of an allocation, exhausted memory, and other processes' memory."""

from __future__ import annotations

import json
from pathlib import Path

from autotune.nullgpu.devices import null_device
from autotune.units import GIB, MIB
from tests.nullgpu.machine import NEEDS_CUDA_BUILD, NullMachine, ended

pytestmark = NEEDS_CUDA_BUILD

# Prints what cudaMalloc, cudaMallocManaged and cudaFree take and give back.
PAGES = """
    import ctypes, json
    cuda = ctypes.CDLL("libcudart.so.13")
    free, total, at = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
    def left():
        assert cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value
    def took(allocate, size, *more):
        before = left()
        return [allocate(ctypes.byref(at), ctypes.c_size_t(size), *more), before - left(), at.value]
    one, page, beyond = took(cuda.cudaMalloc, 1), took(cuda.cudaMalloc, 2 << 20), took(cuda.cudaMalloc, (2 << 20) + 1)
    managed = took(cuda.cudaMallocManaged, 1 << 40, 1)
    too_much = took(cuda.cudaMalloc, left() + 1)
    last_error = [cuda.cudaGetLastError(), cuda.cudaGetLastError()]
    rest = took(cuda.cudaMalloc, left())
    before = left()
    freed = [cuda.cudaFree(ctypes.c_void_p(one[2])), left() - before, cuda.cudaFree(ctypes.c_void_p(one[2]))]
    aligned = [each[2] % (2 << 20) for each in (one, page)]
    print(json.dumps({"sizes": [one[:2], page[:2], beyond[:2]], "aligned": aligned,
        "managed": managed[:2], "too much": too_much[:2], "last": last_error, "rest": rest[0], "freed": freed}))
"""

# Holds 1 GiB until its standard input ends.
HOLDER = """
    import sys, torch
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    print("held", flush=True)
    sys.stdin.read()
"""

SEEN = """
    import json, pynvml
    from autotune.inspection.cuda import visible_gpus
    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(card)
    print(json.dumps([visible_gpus()[0].used_by_others_bytes, [[each.pid, each.usedGpuMemory] for each in processes]]))
"""

TORCH_RUNS_OUT = """
    import json, torch
    held = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2)]
    try:
        torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        text = str(error)
    stats = torch.cuda.memory_stats()
    print(json.dumps([text, torch.cuda.memory_reserved(), stats["num_alloc_retries"], stats["num_ooms"]]))
"""

EXPANDABLE = """
    import json, torch
    a = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
    b = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
    del a
    c = torch.empty(500 << 20, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    del b, c
    torch.cuda.empty_cache()
    print(json.dumps([reserved, total - free, torch.cuda.memory_reserved(), total - torch.cuda.mem_get_info()[0]]))
"""

FORKS = """
    import json, multiprocessing, torch
    def child(queue):
        try:
            torch.ones(1, device="cuda")
            queue.put("ok")
        except Exception as error:
            queue.put(f"{type(error).__name__}: {error}")
    def forked():
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        found = queue.get(timeout=250)
        process.join()
        return found
    count = torch.cuda.device_count()
    before = forked()
    torch.ones(1, device="cuda")
    print(json.dumps([count, before, forked()]))
"""

DRIVER_AFTER_FORK = """
    import ctypes, json, os
    cuda = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    before = cuda.cuDeviceGetCount(ctypes.byref(count))
    cuda.cuInit(0)
    within = cuda.cuDeviceGetCount(ctypes.byref(count))
    pid = os.fork()
    if pid == 0:
        os._exit(cuda.cuInit(0) * 16 + cuda.cuDeviceGetCount(ctypes.byref(count)))
    print(json.dumps([before, within, divmod(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 16)]))
"""


def test_memory_is_taken_in_pages_until_there_is_none(machine: NullMachine) -> None:
    shown = machine.run(PAGES, memory_bytes=8 * GIB)
    assert shown["sizes"] == [[0, 2 * MIB], [0, 2 * MIB], [0, 4 * MIB]]
    assert shown["aligned"] == [0, 0]
    assert shown["managed"] == [0, 0]
    assert (shown["too much"], shown["last"], shown["rest"]) == ([2, 0], [2, 0], 0)
    # The second time, the address is not an allocation's.
    assert shown["freed"] == [0, 2 * MIB, 1]


def test_pytorch_runs_out_at_the_card_s_size(machine: NullMachine) -> None:
    device = null_device("H100-80GB", 4 * GIB)
    text, reserved, retries, failures = machine.run(TORCH_RUNS_OUT, memory_bytes=4 * GIB)
    free = (device.total - device.context - 2 * GIB) / GIB
    assert "Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 4.00 GiB" in text
    assert f"of which {free:.2f} GiB is free" in text
    # Nothing was cached that could have been given back.
    assert (reserved, retries, failures) == (2 * GIB, 1, 1)


def test_what_other_processes_hold_is_taken_and_free_when_they_are_killed(machine: NullMachine) -> None:
    device = null_device("H100-80GB")
    held = device.context + GIB
    with machine.start(HOLDER, variables=machine.environment()) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert machine.run(SEEN) == [held, [[holder.pid, held]]]
        # The other's context, this one's, and the other's tensor.
        assert machine.run(TORCH_RUNS_OUT, memory_bytes=held + device.context + 2 * GIB)[3] == 1
        with machine.start(
            TORCH_RUNS_OUT, variables=machine.environment(memory_bytes=held + device.context)
        ) as process:
            assert "out of memory" in process.communicate(timeout=100)[1]
        holder.kill()
        holder.wait()
        assert machine.run(SEEN) == [0, []]


def test_expandable_segments_count_what_they_map(machine: NullMachine) -> None:
    context = null_device("H100-80GB").context
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    reserved, used, then_reserved, then_used = machine.run(EXPANDABLE, **setting)
    # The 300 MiB that were freed are in the middle, so the 500 MiB go to the end.
    assert (reserved, used) == (1100 * MIB, 1100 * MIB + context)
    assert (then_reserved, then_used) == (0, context)


def test_cuda_does_not_survive_a_fork_and_a_count_of_gpus_does(machine: NullMachine) -> None:
    count, before, after = machine.run(FORKS, count=2)
    assert (count, before) == (2, "ok")
    assert "Cannot re-initialize CUDA in forked subprocess" in after
    not_initialised = 3
    shown = machine.run(DRIVER_AFTER_FORK)
    assert shown == [not_initialised, 0, [not_initialised, not_initialised]]


def test_a_program_that_another_replaces_holds_nothing(machine: NullMachine) -> None:
    program = f"""
        import os, sys, torch
        held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        os.execv(sys.executable, [sys.executable, "-c", {json.dumps(EXECUTED)}])
    """
    with machine.start(program, variables=machine.environment()) as process:
        context = null_device("H100-80GB").context
        assert ended(process) == context


EXECUTED = """
import ctypes, json
cuda = ctypes.CDLL("libcudart.so.13")
free, total = ctypes.c_size_t(), ctypes.c_size_t()
cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
print(json.dumps(total.value - free.value))
"""


def test_a_file_that_is_larger_than_the_host_s_memory_can_be_mapped(machine: NullMachine, tmp_path: Path) -> None:
    program = """
        import json, mmap, sys
        with open(sys.argv[1], "r+b") as file:
            file.truncate(1 << 42)
            try:
                mmap.mmap(file.fileno(), 1 << 42, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                print(json.dumps("mapped"))
            except OSError as error:
                print(json.dumps(error.strerror))
    """
    file = tmp_path / "weights"
    file.touch()
    assert machine.run(program, str(file)) == "mapped"
    without = {**machine.environment(), "LD_PRELOAD": ""}
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "0":
        with machine.start(program, str(file), variables=without) as process:
            assert ended(process) == "Cannot allocate memory"


METER = """
    import json, torch
    from autotune.step.run.meters import CudaMeter
    CudaMeter()
    print(json.dumps([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]))
"""


def test_a_meter_leaves_nothing_in_memory_that_training_would_find(machine: NullMachine) -> None:
    assert machine.run(METER) == [0, 0]
