"""What one trace costs: processor seconds by part, of the first and of a later trace in a process.

Run ``python -m benchmarks.plan.trace_cost [--trainer dpo]``; it makes Llama-3.1-8B's shape with a tokenizer of as many
words, and rows of up to 1,100 tokens, traces TRL's defaults at the largest micro-batch and the fewest layers, and
prints a Markdown table for each trainer. Parts do not contain one another. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from autotune.app.options import checked_options
from autotune.app.planned import planned_machine, planned_workload
from autotune.app.problem import global_batch_of, problem_of
from autotune.core.codec import decode, encode
from autotune.core.events import ignore
from autotune.core.plan import AllocatorUse
from autotune.core.protocol import TraceReplies, TraceRequest, TraceRequests
from autotune.inspection.dataset import dataset_source
from autotune.inspection.model import model_source
from autotune.planning.points import depths_of
from autotune.planning.requests import trace_request
from autotune.planning.tracing.cache import Cache
from autotune.probing.tracing import ServerTracer
from autotune.trainers.evaluation import whole_geometry
from benchmarks.plan.own_sizes import written
from benchmarks.shapes import LETTER, LLAMA_8B

_TRAINERS = ("sft", "dpo", "grpo")
_OPTIONS: dict[str, dict[str, Any]] = {"grpo": {"completion_length": 64}}
_USES = (AllocatorUse(), AllocatorUse(expandable_segments=True))
_TRAINING = "autotune.step.run.traced_training"
_JOB = "autotune.step.jobs.trace"
_PARTS = {
    "configuration": (_JOB, "load_config"),
    "tokenizer": (_JOB, "processor_for"),
    "model on the virtual device": (_TRAINING, "virtual_model"),
    "TRL's trainer": (_TRAINING, "build_virtual"),
    "training steps": ("transformers.Trainer", "train"),
    "save": (_TRAINING, "save_tensors"),
    "rest of the virtual run": (_JOB, "run_virtually"),
    "steady steps": (_JOB, "steady"),
    "sections": (_JOB, "sections"),
    "allocator replays": (_JOB, "_replay_of"),
}


def main() -> None:
    """Trace each trainer's defaults twice, and print what each part took."""
    parser = argparse.ArgumentParser(description="Processor seconds of one trace.")
    parser.add_argument("--trainer", choices=_TRAINERS, action="append")
    asked = parser.parse_args().trainer or _TRAINERS
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        requests = list(_requests(Path(folder), asked))
        from autotune.step.imports import preload, prepare_environment

        prepare_environment("cpu", 1)
        preload("cpu")
        for trainer, request in zip(asked, requests, strict=True):
            print(f"\n| {trainer} | first | later |\n|---|--:|--:|", flush=True)
            if not (pid := os.fork()):
                first, later = _costs(request, Path(folder)), _costs(request, Path(folder))
                for part in first:
                    print(f"| {part} | {first[part]:.3f} | {later[part]:.3f} |", flush=True)
                os._exit(0)
            os.waitpid(pid, 0)


def _requests(folder: Path, trainers: Any) -> Iterator[TraceRequest]:
    model, planned = _model(folder / "model"), planned_machine("H100-80GB")
    with ServerTracer(1, ignore) as tracer:
        for trainer in trainers:
            options = checked_options(trainer=trainer, **_OPTIONS.get(trainer, {}))
            rows = dataset_source(str(written(folder / f"{trainer}.jsonl", trainer, 1100)))
            source, cache = model_source(str(model), "random"), Cache(folder / "cache")
            workload = planned_workload(options, source, rows, tracer, cache, ignore, checked=())
            problem = problem_of(options, workload, planned.machine, global_batch_of(options, planned.machine))
            plan = problem.trainer.plan(problem.normal(problem.baseline), problem.setting)
            geometry = whole_geometry(problem.trainer, plan, workload)
            layers = min(depths_of(plan, workload.model.layer_kinds))
            at = geometry.layout, geometry.worst, layers
            yield trace_request(plan, *at, problem.setting, planned.gpu, _USES)


def _model(directory: Path) -> Path:
    """Write the configuration, and a tokenizer that takes as long to load as the model's own."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1) if chr(code) != LETTER]
    words = {word: number for number, word in enumerate(("<end>", "<pad>", "<unknown>", LETTER, *letters))}
    merges, pieces = list[tuple[str, str]](), list(letters)
    for piece in pieces:
        merges += [(piece, letter) for letter in letters][: LLAMA_8B["vocab_size"] - len(words) - len(merges)]
        if len(merges) + len(words) == LLAMA_8B["vocab_size"]:
            break
        pieces += [piece + letter for letter in letters]
    words |= {"".join(pair): len(words) + number for number, pair in enumerate(merges)}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(words, merges)), eos_token="<end>", pad_token="<pad>"
    )
    wrapped.save_pretrained(directory)
    return directory


def _costs(request: TraceRequest, folder: Path) -> dict[str, float]:
    from autotune.step.job import JobContext
    from autotune.step.jobs.trace import trace_all

    spent = defaultdict[str, float](float)
    begun = time.process_time()
    with _timed(spent), open(os.devnull, "w") as nothing, mock.patch("sys.stdout", nothing):  # noqa: PTH123
        found = trace_all(TraceRequests((request,)), JobContext(folder, time.monotonic()))
    whole, begun = time.process_time() - begun, time.process_time()
    assert found.failure is None, found.failure
    decode(TraceReplies, json.loads(json.dumps(encode(found))))
    parts = {name: spent[name] for name in _PARTS}
    return {**parts, "others": whole - sum(parts.values()), "whole": whole, "its JSON": time.process_time() - begun}


@contextmanager
def _timed(spent: dict[str, float]) -> Iterator[None]:
    inner: list[float] = []

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took = time.process_time() - begun
                spent[part] += took - inner.pop()
                if inner:
                    inner[-1] += took

        return run

    with ExitStack() as stack:
        for part, (place, name) in _PARTS.items():
            owner = pkgutil.resolve_name(place)
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), part)))
        yield


if __name__ == "__main__":
    main()
