"""Times whole optimizer steps in a separate process: by the clock, and composed as a probe does.

It is part of `benchmarks.probe.cost`, which starts ``python -m benchmarks.probe.whole_steps REQUEST`` for each answer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from autotune.core.files.codec import decode, encode
from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.measurement import Schedule

# Steps at the start, where caches fill and optimizer state appears.
_SETTLING_STEPS = 2


def composed_over_whole(request: ProbeRequest, steps: int) -> float:
    """Return the time of a step composed of the first two micro-batches of each step, over what whole steps took.

    Both are of the same steps in the same process, so that no other run's noise is in the ratio.

    Raises:
        RuntimeError: the process failed; its log is the message.
    """
    return _answer("composed", request, steps)


def tokens_per_second(request: ProbeRequest, steps: int) -> float:
    """Return the rate of TRL's own trainer over whole steps: no subclass, its own sampler.

    Raises:
        RuntimeError: the process failed; its log is the message.
    """
    return _answer("plain", request, steps)


def _answer(what: str, request: ProbeRequest, steps: int) -> float:
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        file = Path(folder, "request.json")
        file.write_text(json.dumps({"what": what, "request": encode(request), "steps": steps}), encoding="utf-8")
        command = [sys.executable, "-m", __name__, str(file)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(ran.stderr)
        return float(ran.stdout.splitlines()[-1])


def _composed(request: ProbeRequest, steps: int, folder: Path) -> float:
    from dataclasses import replace

    import numpy as np

    from autotune.step.run.meters import METERS
    from autotune.step.run.progress import Progress
    from autotune.step.run.timing import Timings, WholeStep, estimate_timing
    from autotune.step.run.training import step_size, train

    class Recording(Progress):
        """Keeps the wall clock of each step from the end of the one before."""

        def _time_step(self, index: int, now: float) -> None:
            super()._time_step(index, now)
            walls[index] = now - (self.last_step_seconds or now)

    walls: dict[int, float] = {}
    size = step_size(request.plan)
    micro_batches = steps * size.micro_batches
    schedule = Schedule(
        whole_steps=True, min_micro_batches=micro_batches, max_micro_batches=micro_batches, max_seconds=1e9
    )
    progress = Recording(schedule, METERS[request.device]())
    train(replace(request, schedule=schedule), folder, progress)
    batches = progress.batches
    # Steps that begin with the worst micro-batches are no typical ones.
    typical = [index for index in walls if index >= batches.worst_steps]
    places = {int(place): count for count, place in enumerate(np.flatnonzero(batches.timed))}
    timed = [
        progress.timed.micro_batches[places[index * size.micro_batches + place]]
        for index in typical
        for place in (0, 1)
    ]
    collated = batches.collated.reshape(-1, size.micro_batches)[typical]
    step = WholeStep(size.micro_batches, float(collated.mean()))
    composed = estimate_timing(Timings(timed, progress.timed.updates[-len(typical) :]), step)
    return composed.step_seconds / float(np.mean([walls[index] for index in typical]))


def _plain(request: ProbeRequest, steps: int, folder: Path) -> float:
    from datasets import load_from_disk
    from transformers import TrainerCallback

    from autotune.step.models.heads import LANGUAGE_MODEL
    from autotune.step.models.loading import load_processor, loaded_model
    from autotune.step.objects import config, peft_config, quantization_config
    from autotune.step.run.meters import METERS
    from autotune.step.trainers import find_adapter

    ticks: list[tuple[float, int]] = []
    meter = METERS[request.device]()

    class Clock(TrainerCallback):
        def on_step_end(self, *events: object, **more: object) -> None:
            meter.synchronize()
            ticks.append((time.perf_counter(), trainer._total_train_tokens))

    arguments = config(
        request.plan, output_dir=str(folder), max_steps=_SETTLING_STEPS + steps, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=request.seed,
    )  # fmt: skip
    kwargs, arguments.model_init_kwargs = arguments.model_init_kwargs, None
    known = find_adapter(request.plan.trainer)
    trainer = known.trainer(
        model=loaded_model(request.model, kwargs, quantization_config(request.plan), request.device, LANGUAGE_MODEL),
        args=arguments,
        train_dataset=known.cut(load_from_disk(request.tokenized_directory), request.plan),
        processing_class=load_processor(request.model),
        peft_config=peft_config(request.plan),
        callbacks=[Clock()],
    )
    trainer.train()
    (began, before), (ended, after) = ticks[_SETTLING_STEPS - 1], ticks[-1]
    return (after - before) / (ended - began)


_ANSWERS: Mapping[str, Callable[[ProbeRequest, int, Path], float]] = {"composed": _composed, "plain": _plain}


def main() -> None:
    """Train by the request in a file, and print the answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("request", type=Path, metavar="REQUEST", help="JSON file that benchmarks.probe.cost writes")
    file = parser.parse_args().request
    from autotune.step.imports import prepare_environment

    document = json.loads(file.read_text(encoding="utf-8"))
    request = decode(ProbeRequest, document["request"])
    prepare_environment(request.device, processes=1)
    print(_ANSWERS[document["what"]](request, int(document["steps"]), file.parent))


if __name__ == "__main__":
    main()
