"""Several ranks: the values that NCCL exchanges, and the errors of ranks that have lost a peer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autotune.units import MIB
from tests.nullgpu.machine import NEEDS_CUDA_BUILD, NullMachine, ended

pytestmark = NEEDS_CUDA_BUILD

# A rank without PyTorch; arguments: its number, how many there are, and the name of the communicator.
RANK = """
    import ctypes, json, os, sys, threading, time
    from ctypes import byref, c_int, c_size_t, c_void_p
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    nccl = ctypes.CDLL("libnccl.so.2")
    nccl.ncclGetLastError.restype = ctypes.c_char_p
    INT64, FLOAT, SUM, MAX, AVERAGE = 4, 7, 0, 2, 4
    class Id(ctypes.Structure):
        _fields_ = [("text", ctypes.c_char * 128)]
    def array(of, *values):
        return (of * len(values))(*values)
    def numbers(count, of=ctypes.c_int64):
        return (of * count)()
    def error():
        return nccl.ncclGetLastError(None).decode()
    comm = c_void_p()
    joined = nccl.ncclCommInitRank(byref(comm), size, Id(sys.argv[3].encode()), rank)
    def all_reduce(given, out, type=INT64, operation=SUM, of=None):
        return nccl.ncclAllReduce(given, out, c_size_t(len(out)), type, operation, of or comm, None)
    def say(**found):
        print(json.dumps(found), flush=True)
"""

COLLECTIVES = (
    RANK
    + """
    total, highest, mean = numbers(2), numbers(1), numbers(2, ctypes.c_float)
    all_reduce(array(ctypes.c_int64, rank, 10 * rank), total)
    all_reduce(array(ctypes.c_int64, -rank), highest, operation=MAX)
    all_reduce(array(ctypes.c_float, rank, 1.5), mean, FLOAT, AVERAGE)
    gathered, told, part, crossed = numbers(2 * size), numbers(1), numbers(1), numbers(size)
    nccl.ncclAllGather(array(ctypes.c_int64, rank, rank * rank), gathered, c_size_t(2), INT64, comm, None)
    nccl.ncclBroadcast(array(ctypes.c_int64, 100 + rank), told, c_size_t(1), INT64, size - 1, comm, None)
    mine = array(ctypes.c_int64, *(100 * rank + other for other in range(size)))
    nccl.ncclReduceScatter(mine, part, c_size_t(1), INT64, SUM, comm, None)
    nccl.ncclAlltoAll(mine, crossed, c_size_t(1), INT64, comm, None)
    came = numbers(1)
    nccl.ncclGroupStart()
    nccl.ncclRecv(came, c_size_t(1), INT64, (rank - 1) % size, comm, None)
    nccl.ncclSend(array(ctypes.c_int64, 7 * rank), c_size_t(1), INT64, (rank + 1) % size, comm, None)
    ring = nccl.ncclGroupEnd()
    large = numbers(1 << 20)
    synchronised = [all_reduce(numbers(1 << 20), large), large[0]]
    half = c_void_p()
    nccl.ncclCommSplit(comm, rank % 2, -rank, byref(half), None)
    place, count, of_half = c_int(), c_int(), numbers(1)
    nccl.ncclCommUserRank(half, byref(place)), nccl.ncclCommCount(half, byref(count))
    all_reduce(array(ctypes.c_int64, rank), of_half, of=half)
    say(joined=joined, total=list(total), highest=list(highest), mean=list(mean), gathered=list(gathered),
        told=list(told), part=list(part), crossed=list(crossed), ring=[ring, *came], synchronised=synchronised,
        half=[place.value, count.value, *of_half], ended=nccl.ncclCommDestroy(half) + nccl.ncclCommDestroy(comm))
"""
)

# Rank 1 says that it is there, and waits to be killed; the others go on without it.
LEFT_ALONE = (
    RANK
    + """
    first = all_reduce(numbers(1), numbers(1))
    if rank == 1:
        say(first=first)
        sys.stdin.read()
    code = all_reduce(numbers(1), numbers(1))
    asynchronous = c_int()
    nccl.ncclCommGetAsyncError(comm, byref(asynchronous))
    text = error()
    again = all_reduce(numbers(1), numbers(1))
    say(first=first, code=code, error=text, asynchronous=asynchronous.value, again=again)
"""
)

DISAGREE = RANK + "    say(code=all_reduce(numbers(1 + rank), numbers(1 + rank)), error=error())\n"
LATE = RANK + "    say(joined=joined, error=error())\n"
ABORTED = (
    RANK
    + """
    if rank == 0:
        threading.Timer(0.2, lambda: nccl.ncclCommAbort(comm)).start()
        say(code=all_reduce(numbers(1), numbers(1)), error=error())
        sys.exit()
    sys.stdin.read()
"""
)

# A model trained by torchrun; arguments: how it is distributed, the folder of results, and the bytes to be held in the
# end. DDP builds its buckets anew in the second step, and NCCL's watchdog, which looks every 100 ms, holds the old ones
# until it has seen that their collectives ended: steps go on until it has.
TRAINED = """
    import json, os, sys, time, torch, torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    world = dist.get_world_size()
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    sums = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.uint8):
        generator = torch.Generator().manual_seed(0)
        both = (torch.randn(2, 200, generator=generator) * 40).to(dtype)
        found = both[rank].cuda()
        dist.all_reduce(found)
        sums[str(dtype)] = bool((found.cpu() == both.sum(0, dtype=dtype)).all())
    layers = [torch.nn.Linear(512, 512, bias=False, device="cuda") for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    if sys.argv[1] == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    else:
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(100):
        model(torch.randn(4, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        held = torch.tensor([torch.cuda.memory_allocated()])
        most = held.cuda()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if step > 0 and int(most) <= 1.01 * int(sys.argv[3]):
            break
        time.sleep(0.1)
    dist.barrier()
    dist.destroy_process_group()
    with open(os.path.join(sys.argv[2], f"{rank}.json"), "w") as file:
        json.dump({"objects": objects, "sums": sums, "held": int(held),
                   "device": torch.cuda.current_device()}, file)
"""


def all_of(machine: NullMachine, program: str, size: int, **options: Any) -> list[Any]:
    """Run a program as each rank, and return the output of each."""
    variables = machine.environment(count=size, **options)
    started = [machine.start(program, str(rank), str(size), "it", variables=variables) for rank in range(size)]
    return [ended(process) for process in started]


@pytest.mark.parametrize("size", [2, 8])
def test_ranks_exchange_small_tensors(machine: NullMachine, size: int) -> None:
    for rank, shown in enumerate(all_of(machine, COLLECTIVES, size)):
        ranks = range(size)
        assert (shown["joined"], shown["ended"]) == (0, 0)
        assert shown["total"] == [sum(ranks), 10 * sum(ranks)]
        assert shown["highest"] == [0]
        assert shown["mean"] == [sum(ranks) / size, 1.5]
        assert shown["gathered"] == [number for other in ranks for number in (other, other * other)]
        assert shown["told"] == [100 + size - 1]
        assert shown["part"] == [100 * sum(ranks) + size * rank]
        assert shown["crossed"] == [100 * other + rank for other in ranks]
        assert shown["ring"] == [0, 7 * ((rank - 1) % size)]
        assert shown["synchronised"] == [0, 0]
        like = [other for other in ranks if other % 2 == rank % 2]
        # The ranks of a part are in the order of their keys, which are negative numbers here.
        assert shown["half"] == [like[::-1].index(rank), len(like), sum(like)]


def test_ranks_reduce_all_numbers_of_e4m3(machine: NullMachine) -> None:
    program = (
        RANK
        + """
    # 256, 288, 320, 448, -448 and NaN as torch.float8_e4m3fn has them, then 448 that is doubled.
    codes = [0x78, 0x79, 0x7a, 0x7e, 0xfe, 0x7f]
    E4M3, highest, doubled = 10, numbers(len(codes), ctypes.c_uint8), numbers(1, ctypes.c_uint8)
    all_reduce(array(ctypes.c_uint8, *codes), highest, E4M3, MAX)
    all_reduce(array(ctypes.c_uint8, 0x7e), doubled, E4M3, SUM)
    say(highest=list(highest), doubled=list(doubled))
"""
    )
    for shown in all_of(machine, program, 2):
        assert shown == {"highest": [0x78, 0x79, 0x7A, 0x7E, 0xFE, 0x7F], "doubled": [0x7E]}


def test_one_process_stands_for_all_ranks_where_that_is_asked_for(machine: NullMachine) -> None:
    program = (
        RANK
        + """
    total, gathered = numbers(1), numbers(size)
    all_reduce(array(ctypes.c_int64, 5), total)
    nccl.ncclAllGather(array(ctypes.c_int64, 3), gathered, c_size_t(1), INT64, comm, None)
    came = numbers(1)
    messages = [nccl.ncclSend(array(ctypes.c_int64, n), c_size_t(1), INT64, 1, comm, None) for n in range(20)]
    messages += [nccl.ncclRecv(came, c_size_t(1), INT64, 1, comm, None) for n in range(20)]
    say(joined=joined, total=list(total), gathered=list(gathered), messages=max(messages))
"""
    )
    shown = machine.run(program, "2", "4", "it", alone=True)
    assert shown == {"joined": 0, "total": [20], "gathered": [3, 3, 3, 3], "messages": 0}


def test_a_rank_that_is_killed_ends_the_others_with_an_error(machine: NullMachine) -> None:
    variables = machine.environment(count=3)
    ranks = [machine.start(LEFT_ALONE, str(rank), "3", "it", variables=variables) for rank in range(3)]
    second = ranks.pop(1)
    assert second.stdout is not None
    assert json.loads(second.stdout.readline()) == {"first": 0}
    second.kill()
    second.communicate()
    remote_error = 6
    for process in ranks:
        shown = ended(process)
        assert (shown["first"], shown["code"], shown["asynchronous"]) == (0, remote_error, remote_error)
        assert "waits for rank 1 in AllReduce of 1 numbers" in shown["error"]
        assert f"which has ended (process {second.pid})" in shown["error"]
        assert shown["again"] == remote_error


def test_ranks_that_disagree_are_told_in_what(machine: NullMachine) -> None:
    first, second = all_of(machine, DISAGREE, 2)
    invalid_usage = 5
    assert (first["code"], second["code"]) == (invalid_usage, invalid_usage)
    for size in (1, 2):
        assert f"AllReduce of {size} numbers" in first["error"]
        assert f"AllReduce of {size} numbers" in second["error"]


def test_a_rank_that_does_not_come_is_an_error_after_a_while(machine: NullMachine) -> None:
    shown = machine.run(LATE, "0", "2", "it", count=2, NULLGPU_PATIENCE="1")
    assert shown["joined"] == 2
    assert "rank 0 waits for rank 1 to join, for 1 s" in shown["error"]


def test_a_rank_that_waits_can_be_aborted_by_another_thread(machine: NullMachine) -> None:
    variables = machine.environment(count=2)
    with (
        machine.start(ABORTED, "0", "2", "it", variables=variables) as waiting,
        machine.start(ABORTED, "1", "2", "it", variables=variables) as idle,
    ):
        shown = ended(waiting)
        idle.communicate()
    assert shown["code"] == 2
    assert "aborted" in shown["error"]


@pytest.mark.nightly
@pytest.mark.parametrize(("how", "copies"), [("ddp", 4), ("fsdp2", 1.5)])
def test_torchrun_trains_on_two_null_gpus(machine: NullMachine, how: str, copies: float) -> None:
    folder = machine.table.parent
    script = folder / "train.py"
    script.write_text(TRAINED.replace("\n    ", "\n"), encoding="utf-8")
    # Weights and two moments, and DDP's buckets of gradients; or a half of all. cuBLAS has a workspace of 32 MiB on an
    # H100 for each of two threads, that of the forward and that of the backward.
    expected = int(copies * 8 * 512 * 512 * 4) + 64 * MIB
    launcher = f"""
        import sys
        from torch.distributed.run import main
        main(["--standalone", "--nproc-per-node", "2", {str(script)!r}, {how!r}, {str(folder)!r},
              "{expected}"])
        print("0")
    """
    assert machine.run(launcher, count=2) == 0
    for rank in range(2):
        shown = json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
        assert shown["objects"] == [{"rank": 0}, {"rank": 1}]
        assert all(shown["sums"].values()), shown["sums"]
        assert shown["device"] == rank
        assert shown["held"] == pytest.approx(expected, rel=0.01)
