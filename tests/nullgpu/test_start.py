"""CUDA, PyTorch and NVML find a null GPU and report the figures of its table."""

from __future__ import annotations

import pytest

from autotune.nullgpu.devices import null_device, null_device_names
from tests.nullgpu.machine import NEEDS_CUDA_BUILD, NullMachine

pytestmark = NEEDS_CUDA_BUILD

BY_NVML = """
    import ctypes, json, pynvml
    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(1)
    memory = pynvml.nvmlDeviceGetMemoryInfo(card, version=pynvml.nvmlMemory_v2)
    cudart = ctypes.CDLL("libcudart.so.13")
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cudart.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    print(json.dumps({
        "count": pynvml.nvmlDeviceGetCount(), "name": pynvml.nvmlDeviceGetName(card),
        "capability": pynvml.nvmlDeviceGetCudaComputeCapability(card),
        "memory": [memory.total, memory.reserved, memory.used], "free": free.value, "total": total.value,
        "logged": [pynvml.nvmlDeviceGetTemperature(card, 0), pynvml.nvmlDeviceGetPowerUsage(card),
                   pynvml.nvmlDeviceGetClockInfo(card, 0), pynvml.nvmlDeviceGetEnforcedPowerLimit(card),
                   pynvml.nvmlDeviceGetPowerManagementLimit(card), pynvml.nvmlDeviceGetTotalEnergyConsumption(card)],
    }))
"""

BY_TORCH = """
    import json, pynvml, torch
    from autotune.inspection.cuda import visible_gpus
    found = torch.cuda.get_device_properties(0)
    torch.ones(1, device="cuda")
    pynvml.nvmlInit()
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    print(json.dumps({
        "name": found.name, "capability": [found.major, found.minor], "total": found.total_memory,
        "multiprocessors": found.multi_processor_count, "l2": found.L2_cache_size,
        "shared": found.shared_memory_per_block_optin, "free": torch.cuda.mem_get_info()[0], "uuids": seen,
        "used": [gpu.used_by_others_bytes for gpu in visible_gpus()],
        "null": [gpu.is_null for gpu in visible_gpus()],
        "cards": [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(3)],
        "versions": [torch.version.cuda, torch.cuda.is_bf16_supported(), torch.backends.cudnn.is_available()],
    }))
"""


@pytest.mark.parametrize("name", null_device_names())
def test_nvml_and_the_runtime_report_the_table(machine: NullMachine, name: str) -> None:
    device = null_device(name)
    shown = machine.run(BY_NVML, gpu=name, count=2)
    assert (shown["count"], shown["name"]) == (2, device.name)
    assert shown["capability"] == [device.major, device.minor]
    assert shown["memory"] == [device.total + device.reserved, device.reserved, 0]
    assert (shown["total"], shown["free"]) == (device.total, device.total - device.context)
    assert shown["logged"] == [0] * 6


def test_torch_reports_the_table_and_the_devices_that_are_visible(machine: NullMachine) -> None:
    device = null_device("A100-80GB")
    shown = machine.run(BY_TORCH, gpu="A100-80GB", count=3, CUDA_VISIBLE_DEVICES="2,0")
    assert (shown["name"], shown["capability"]) == (device.name, [device.major, device.minor])
    assert (shown["total"], shown["multiprocessors"]) == (device.total, device.multiprocessors)
    assert (shown["l2"], shown["shared"]) == (device.l2_bytes, device.shared_per_block)
    # The tensor took a segment of 2 MiB.
    assert shown["free"] == device.total - device.context - 2 * 2**20
    assert shown["used"] == [device.context + 2 * 2**20, 0]
    assert shown["null"] == [True, True]
    assert [f"GPU-{uuid}" for uuid in shown["uuids"]] == [shown["cards"][2], shown["cards"][0]]
    assert shown["versions"][1:] == [True, True]


def test_a_device_is_visible_by_its_identifier(machine: NullMachine) -> None:
    program = """
        import json, torch
        print(json.dumps([torch.cuda.device_count(), str(torch.cuda.get_device_properties(0).uuid)]))
    """
    by_nvml = """
        import json, pynvml
        pynvml.nvmlInit()
        print(json.dumps(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(1))))
    """
    uuid = machine.run(by_nvml, count=2)
    assert machine.run(program, count=2, CUDA_VISIBLE_DEVICES=uuid) == [1, uuid.removeprefix("GPU-")]


def test_without_a_device_there_is_none(machine: NullMachine) -> None:
    variables = machine.environment()
    del variables["NULLGPU_DEVICE"]
    program = "import json, torch; print(json.dumps(torch.cuda.is_available()))"
    with machine.start(program, variables=variables) as process:
        assert process.communicate(timeout=100)[0].strip() == "false"


SLOW_TO_END = """
    import json, os, time, torch

    class Late:
        def __del__(self, sleep=time.sleep):
            sleep(1)

    late = Late()
    leaf = torch.ones(1, device="cuda", requires_grad=True)
    (leaf * 2).sum().backward()
    core = {min(os.sched_getaffinity(0))}
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, core)
        if thread != os.getpid():
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    print(json.dumps("done"))
"""


def test_a_process_ends_well_whose_autograd_thread_runs_only_when_all_else_sleeps(machine: NullMachine) -> None:
    """On a busy machine, that thread was in the midst of freeing a tensor when the interpreter ended: it aborted."""
    assert machine.run(SLOW_TO_END) == "done"


FORKED = """
    import json, tempfile, threading
    from pathlib import Path
    from autotune.core.jobs.protocol import Job, SpeedsRequest
    from autotune.probing import JobServer
    seen = set()
    with JobServer("cpu") as server, tempfile.TemporaryDirectory() as folder:
        asked = Job.MEASURE_SPEEDS, SpeedsRequest(0.5), Path(folder, "job")
        running = threading.Thread(target=server.run, args=asked)
        running.start()
        while running.is_alive():
            running.join(0.05)
            tasks = Path(f"/proc/{server.pid}/task").glob("*/children")
            children = [child for task in tasks for child in task.read_text().split()]
            ran = [Path(f"/proc/{child}/cmdline") for child in children]
            seen |= {each.read_text() for each in ran if each.exists()}
        print(json.dumps([len(seen) > 0, any("--worker" in each for each in seen), (asked[2] / "reply.json").exists()]))
"""


@pytest.mark.nightly
def test_jobs_on_a_cpu_are_forked_though_bitsandbytes_finds_a_gpu(machine: NullMachine) -> None:
    some_ran, in_an_interpreter_of_its_own, replied = machine.run(FORKED)
    assert (some_ran, in_an_interpreter_of_its_own, replied) == (True, False, True)
