"""Every causal language model of transformers: its trace against a run, its plan against a trace.

Run ``OMP_NUM_THREADS=1 python -m benchmarks.plan.architectures [--only llama,mamba] [--page]``; it compares each
architecture that has no row in ``architectures.jsonl``, or those of ``--only`` anew, and writes ``architectures.md``.
No GPU is needed.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from autotune.app.arguments import SearchArguments
from autotune.app.options import checked_options
from autotune.app.planned import planned_machine, planned_workload, rows_of_length
from autotune.app.problem import global_batch_of, problem_of
from autotune.app.requests import traces_of
from autotune.core.events import ignore
from autotune.core.jobs.traced import TraceRequest
from autotune.core.machine import Machine
from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import Shape
from autotune.inspection.model import model_source
from autotune.planning.evaluator import Evaluator
from autotune.planning.tracing.cache import Cache
from autotune.probing import trace
from autotune.probing.tracing import ServerTracer
from autotune.trainers import find_trainer
from benchmarks.common import read_rows, whole_step

FOLDER = Path(__file__).resolve().parent
VOCABULARY = 512
_FEW, _MANY = 3, 16
"""Layers of the model that is run, and of the one that is planned."""
_RUN, _PLANNED_TOKENS = Shape(2, 48), 256
_GPU = "H100-80GB"
_LONGEST_SECONDS = 600.0
_TILE = ("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 128)
"""TRL's tile of 32,768 words would be most of a small model's peak, and hide errors in the rest."""
_STEPS = "optimizer step"
_ABOUT = f"""# Every architecture of transformers, traced and planned

`OMP_NUM_THREADS=1 python -m benchmarks.plan.architectures`, transformers 5.23.0, torch 2.13.0+cpu, TRL 1.16.0. TRL's
`SFTTrainer` on a model of each architecture that transformers has for causal language modelling, as narrow as
autotune's self-test of packing makes them, with {VOCABULARY} words. Errors are negative where there is too little.

- **run**: {_FEW} layers, two optimizer steps of two micro-batches of {_RUN.rows} rows of {_RUN.tokens} tokens, in
  float32, without checkpointing. The highest level of PyTorch's CPU allocator in a step, beside that of the trace.
- **planned**: {_MANY} layers, TRL's default with 8 rows of {_PLANNED_TOKENS} tokens on an {_GPU}. What `autotune plan`
  extrapolates from few layers, beside a trace of all of them: allocated and reserved bytes, and the time of a step."""


def main() -> None:
    """Compare the architectures that have no row yet, or the named ones, and write the page."""
    parser = argparse.ArgumentParser(description="Traces and plans of every architecture of transformers.")
    parser.add_argument("--only", help="names, with commas between them, that are compared anew")
    parser.add_argument("--page", action="store_true", help="write the page from the rows that are there")
    asked = parser.parse_args()
    kept = FOLDER / "architectures.jsonl"
    rows, every = {row["architecture"]: row for row in read_rows(kept)}, architectures()
    named = asked.only.split(",") if asked.only else []
    if strange := sorted({*named} - {*every}):
        parser.error(f"transformers has no architecture {', '.join(strange)} for causal language modelling")
    wanted = [] if asked.page else named or [name for name in every if name not in rows]
    if wanted:
        _preload()
    planned = planned_machine(_GPU)
    with ServerTracer(planned.hardware.cores, ignore) as tracer:
        for name in wanted:
            rows[name] = {"architecture": name, "run": _run_apart(name), "planned": _planned(name, planned, tracer)}
            kept.write_text("".join(json.dumps(row) + "\n" for row in rows.values()), encoding="utf-8")
            print(line_of(rows[name]), flush=True)
    (FOLDER / "architectures.md").write_text(page([*rows.values()]), encoding="utf-8")


def architectures() -> list[str]:
    """Return the architectures that transformers has for causal language modelling, by its names."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _preload() -> None:
    """Import what each run needs, once, before processes are forked."""
    import tests.virtual.reference  # noqa: F401 both are for the children


def _run_apart(name: str) -> Mapping[str, Any]:
    """Return the comparison of a run in a separate process, or the error that ended it."""
    receives, sends = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_sent, args=(name, sends))
    process.start()
    sends.close()
    try:
        found: Mapping[str, Any] = receives.recv() if receives.poll(_LONGEST_SECONDS) else {"error": "took too long"}
    except EOFError:
        found = {"error": "the process died"}
    process.kill()
    process.join()
    return found


def _sent(name: str, sends: Any) -> None:
    warnings.simplefilter("ignore")
    try:
        with redirect_stdout(io.StringIO()):
            found = _run(name)
    except Exception as error:  # noqa: BLE001 any error is a result
        found = {"error": _short(error)}
    sends.send(found)


def _short(error: Exception, folder: Path | None = None) -> str:
    message = str(getattr(error, "message", None) or f"{type(error).__name__}: {error}")
    return " ".join(message.replace(f"{folder}/", "").split())[:200]


def _narrow(name: str, layers: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    from autotune.step.models.shrink import few_layers, narrow

    config = few_layers(narrow(AutoConfig.for_model(name)), layers)
    config.get_text_config().vocab_size = VOCABULARY
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return config


def _run(name: str) -> Mapping[str, Any]:
    """Return the peaks of a step in a run on the CPU and in its trace: of the step with the largest difference."""
    from autotune.step.run.traced_training import traced_training
    from autotune.step.run.virtual_trainer import TracedRows
    from autotune.virtual import trace as run_virtually
    from tests.small import small_tokenizer
    from tests.virtual.reference import phases_on_cpu

    trainer = find_trainer("sft")
    plan = TrainingPlan("sft", {"bf16": False, "gradient_checkpointing": False, "gradient_accumulation_steps": 2}, {})
    layout = trainer.layout(plan, _RUN.rows)
    rows = TracedRows(trainer.traced_rows(layout, _RUN, 1.0))
    plan = trainer.traced_plan(plan, layout, _RUN)
    with mock.patch(*_TILE):
        try:
            steps = traced_training(plan, _narrow(name, _FEW), small_tokenizer(), rows)
            found = phases_on_cpu(steps, lambda name: name.startswith(_STEPS))
        except Exception as error:  # noqa: BLE001 an architecture that cannot be trained so is not compared
            return {"untrained": _short(error)}
        traced = {phase.name: phase.device_peak.bytes for phase in run_virtually(steps, target="cpu").phases}
    real = {phase.name: phase.peak_bytes for phase in found}
    worst = max(real, key=lambda name: abs(traced[name] / real[name] - 1))
    return {"real": real[worst], "traced": traced[worst]}


def _planned(name: str, planned: Machine, tracer: ServerTracer) -> Mapping[str, Any]:
    """Return the planned figures of TRL's default and those of a trace of all layers, or the error of either."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            return _planned_and_whole(name, planned, tracer, Path(directory))
        except Exception as error:  # noqa: BLE001 any error is a result
            return {"error": _short(error, Path(directory))}


def _planned_and_whole(name: str, planned: Machine, tracer: ServerTracer, folder: Path) -> Mapping[str, Any]:
    from tests.small import small_tokenizer

    options = checked_options(SearchArguments(trainer="sft", max_length=_PLANNED_TOKENS))
    batch = global_batch_of(options, planned)
    _narrow(name, _MANY).save_pretrained(folder / "model")
    small_tokenizer().save_pretrained(folder / "model")
    source = model_source(str(folder / "model"), "random")
    cache = Cache(folder / "cache")
    workload = planned_workload(options, source, None, tracer, cache, ignore)
    problem = problem_of(options, rows_of_length(workload, _PLANNED_TOKENS, batch), planned, batch)
    traces = traces_of(workload, planned, tracer, cache)
    (estimate,) = Evaluator(problem, planned.gpu, planned.hardware.memory_bytes, traces).run([problem.baseline])
    memory = estimate.memory
    if memory is None:
        return {"error": estimate.reason}
    rows = ((_PLANNED_TOKENS,),) * int(problem.baseline["per_device_train_batch_size"])
    plan = problem.trainer.plan(problem.baseline, problem.setting)
    whole = trace(tracer.server, TraceRequest(plan, source, "cuda", rows, gpu=planned.gpu), folder / "job")
    step = whole_step(plan, whole)
    assert step is not None
    replayed = whole.replayed()
    return {
        "allocated": [memory.peak_bytes, replayed.allocated_bytes],
        "reserved": [memory.reserved_bytes, replayed.reserved_bytes],
        "seconds": [memory.step_seconds, step.seconds],
    }


_FIGURES = ("allocated", "reserved", "seconds")


def errors_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the shares by which a row's figures are off, by their names; those that are not there are left out."""
    run, planned = row["run"], row["planned"]
    found = {"run": run["traced"] / run["real"] - 1} if "real" in run else {}
    return found | {name: planned[name][0] / planned[name][1] - 1 for name in _FIGURES if planned.get(name)}


def line_of(row: Mapping[str, Any]) -> str:
    """Return a row of the page's table."""
    errors = errors_of(row)
    shares = (f"{errors[name]:+.3%}" if name in errors else "" for name in ("run", *_FIGURES))
    reasons = [row["run"].get("untrained") or row["run"].get("error"), row["planned"].get("error")]
    return f"| {row['architecture']} | {' | '.join(shares)} | {'; '.join(dict.fromkeys(filter(None, reasons)))} |"


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page: how the errors lie, and every row."""
    table = [
        "| architecture | run | planned: allocated | reserved | time | not compared |",
        "|---|--:|--:|--:|--:|---|",
    ]
    ordered = sorted(rows, key=lambda row: str(row["architecture"]))
    return "\n\n".join([_ABOUT, "\n".join(_summary(rows)), "\n".join([*table, *map(line_of, ordered)])]) + "\n"


def sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the result in one sentence, which documents quote."""
    errors = [errors_of(row) for row in rows]
    run = [abs(each["run"]) for each in errors if "run" in each]
    planned = [abs(each["allocated"]) for each in errors if "allocated" in each]
    return (
        f"Of {len(rows)} architectures that transformers has for causal language modelling, {len(run)} train as narrow"
        f" copies and can be traced: all of them within {max(run):.2%} of the CPU's allocator. Plans of {len(planned)}"
        f" from few layers are within {max(planned):.2%} of traces of all, in allocated memory"
    )


def _summary(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    untrained = sum("untrained" in row["run"] for row in rows)
    yield f"{sentence(rows)}."
    yield f"{untrained} do not train as narrow as this, or not at all."
    yield ""
    yield "| figure | architectures | median | more than 1 % off | worst |"
    yield "|---|--:|--:|--:|--:|"
    errors = [errors_of(row) for row in rows]
    for name in ("run", *_FIGURES):
        found = [each[name] for each in errors if name in each]
        if found:
            off = sum(abs(error) > 0.01 for error in found)
            sizes = f"{median(map(abs, found)):.3%} | {off} | {max(found, key=abs):+.2%}"
            yield f"| {'run' if name == 'run' else f'planned: {name}'} | {len(found)} | {sizes} |"


if __name__ == "__main__":
    main()
