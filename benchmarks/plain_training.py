"""TRL's own trainer over whole optimizer steps in a process of its own: no subclass, its own sampler, its own clock."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from autotune.core.codec import decode, encode
from autotune.core.protocol import ProbeRequest

# Steps at the start, where caches fill and optimizer state appears.
_SETTLING_STEPS = 2


def tokens_per_second(request: ProbeRequest, steps: int) -> float:
    """Return the rate of ``steps`` whole steps of a plan, after two more that do not count.

    Raises:
        RuntimeError: the process failed; its log is the message.
    """
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        file = Path(folder, "request.json")
        file.write_text(json.dumps({"request": encode(request), "steps": steps}), encoding="utf-8")
        command = [sys.executable, "-m", __name__, str(file)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(ran.stderr)
        return float(ran.stdout.splitlines()[-1])


def main(file: str) -> None:
    """Train as the request in a file says, and print tokens per second."""
    from autotune.step.imports import prepare_environment

    document = json.loads(Path(file).read_text(encoding="utf-8"))
    request, steps = decode(ProbeRequest, document["request"]), int(document["steps"])
    prepare_environment(request.device)
    from transformers import TrainerCallback

    from autotune.step.meters import METERS
    from autotune.step.model import load_processor, random_model
    from autotune.step.objects import TRAINERS, config, peft_config, quantization_config
    from autotune.step.training import training_rows

    ticks: list[tuple[float, int]] = []
    meter = METERS[request.device]()

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            meter.synchronize()
            ticks.append((time.perf_counter(), trainer._total_train_tokens))

    arguments = config(
        request.plan, output_dir=str(Path(file).parent), max_steps=_SETTLING_STEPS + steps, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=request.seed,
    )  # fmt: skip
    kwargs, arguments.model_init_kwargs = arguments.model_init_kwargs, None
    trainer = TRAINERS[request.plan.trainer].trainer(
        model=random_model(request.model, kwargs, quantization_config(request.plan), request.device),
        args=arguments,
        train_dataset=training_rows(request),
        processing_class=load_processor(request.model),
        peft_config=peft_config(request.plan),
        callbacks=[Clock()],
    )
    trainer.train()
    (began, before), (ended, after) = ticks[_SETTLING_STEPS - 1], ticks[-1]
    print((after - before) / (ended - began))


if __name__ == "__main__":
    main(sys.argv[1])
