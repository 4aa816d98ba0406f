"""Plans for several machines by network, and the error of their times against traces of all layers.

Run ``python -m benchmarks.plan.networks``; it plans an 8B shape on 32 H100 in four machines for networks of several
speeds, traces all layers for the same steps, and prints a row for each. A trace is timed for all networks at once.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.app.arguments import SearchArguments
from autotune.app.options import checked_options
from autotune.app.planned import planned_machine, planned_workload, rows_of_length
from autotune.app.problem import problem_of
from autotune.app.requests import traces_of
from autotune.core.candidate import Choice
from autotune.core.events import ignore
from autotune.core.gpu import Gpu
from autotune.core.jobs.traced import TraceReply, TraceRequest
from autotune.inspection.model import model_source
from autotune.planning.evaluator import Evaluator
from autotune.planning.tracing.cache import Cache
from autotune.probing.tracing import ServerTracer
from benchmarks.common import whole_step
from benchmarks.shapes import LLAMA_8B, write_model

_GPU, _PROCESSES, _MACHINES, _DOCUMENTS, _TOKENS = "H100-80GB", 32, 4, 128, 2048
_NETWORKS = (None, 6400.0, 3200.0, 2000.0, 1000.0, 700.0, 400.0, 200.0)
_WAYS: tuple[dict[str, Choice], ...] = (
    {"sharding": "zero3", "per_device_train_batch_size": 4},
    {"sharding": "fsdp2", "per_device_train_batch_size": 4},
    {"sharding": "fsdp2", "per_device_train_batch_size": 1},
    {"sharding": "fsdp2", "per_device_train_batch_size": 4, "dp_replicate_size": 4},
)
_ALIKE: dict[str, Choice] = {
    "precision": "bfloat16", "liger": "on", "attention": "sdpa", "gradient_checkpointing": "on",
}  # fmt: skip


def main() -> None:
    """Plan and trace, and print how they compare."""
    argparse.ArgumentParser(description="How a plan follows from the network between machines.").parse_args()
    print("| choices | network, Gbit/s | step, planned | step, traced | off by | sending | tok/s, planned |")
    print("|---|--:|--:|--:|--:|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = str(write_model(folder / "model", LLAMA_8B))
        for way in _WAYS:
            for row in _compared(way, model, Cache(folder / "cache")):
                print(row, flush=True)


def _compared(way: dict[str, Choice], model: str, cache: Cache) -> Iterator[str]:
    source = model_source(model, "random")
    options = checked_options(
        SearchArguments(
            trainer="sft",
            num_processes=_PROCESSES,
            global_batch_size=_DOCUMENTS,
            max_length=_TOKENS,
            fix={**_ALIKE, **way},
        )
    )
    machines = {network: planned_machine(_GPU, _PROCESSES, _MACHINES, network) for network in _NETWORKS}
    gpus = [machine.device for machine in machines.values()]
    here = machines[None]
    with ServerTracer(here.hardware.cores, ignore) as tracer:
        workload = planned_workload(options, source, None, tracer, cache, ignore)
        problem = problem_of(options, rows_of_length(workload, _TOKENS, _DOCUMENTS), here, _DOCUMENTS)
        traces = traces_of(workload, here, lambda requests: tracer(_for_all(requests, gpus)), cache)
        candidate = problem.baseline
        plan = problem.trainer.plan(candidate, problem.setting)
        rows = ((_TOKENS,),) * int(candidate["per_device_train_batch_size"])
        asked = [TraceRequest(plan, source, "cuda", rows, gpu=gpu) for gpu in gpus]
        for network, gpu, whole in zip(_NETWORKS, gpus, traces.get(asked), strict=True):
            assert isinstance(whole, TraceReply), whole
            memory = Evaluator(problem, gpu, gpu.memory_bytes, traces).run([candidate])[0].memory
            step = whole_step(plan, whole)
            assert memory is not None
            assert memory.step_seconds is not None
            assert step is not None
            words = " ".join(f"{knob}={choice}" for knob, choice in way.items())
            yield (
                f"| {words} | {'-' if network is None else f'{network:g}'} | {memory.step_seconds * 1e3:,.0f} ms"
                f" | {step.seconds * 1e3:,.0f} ms | {memory.step_seconds / step.seconds - 1:+.1%}"
                f" | {step.communication_seconds * 1e3:,.0f} ms | {_DOCUMENTS * _TOKENS / memory.step_seconds:,.0f} |"
            )


def _for_all(requests: Sequence[TraceRequest], gpus: Sequence[Gpu]) -> Sequence[TraceRequest]:
    """Return requests whose traces are timed for all networks."""
    return [replace(request, gpu=gpus[0], others=tuple(gpus[1:])) for request in requests]


if __name__ == "__main__":
    main()
