"""The training loop of xMem's evaluation for a virtual device, and its outcome on a GPU of a given memory.

The model comes from its configuration in float32, the optimizer is made before the model is moved, and what the model
returns lives into the next iteration. Tokenising and the learning rate have no part in the figures.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from autotune.inspection.gpus import UNMEASURED_CONTEXT_BYTES
from autotune.virtual import phase, trace, trace_inputs
from autotune.virtual.allocator.caching import OutOfMemoryError
from autotune.virtual.recording.records import Trace
from autotune.virtual.recording.replay import replay
from autotune.virtual.steps.varied import MicroBatch, steps_before, varied
from benchmarks.published.tables import Outcome

_TOKEN = 5
_RANDOM_LENGTHS = 32


def training(settings: Mapping[str, Any], counted: Callable[[int], None]) -> Callable[[torch.device], None]:
    """Return a function of a device that trains for the iterations of the loop, each a phase by its number.

    Args:
        settings: of the table's loop, with those of a row over them.
        counted: is told the number of parameters.
    """
    shape = settings["rows"], settings["tokens"]
    described = settings["models"][settings["model"]]

    def run(device: torch.device) -> None:
        config = AutoConfig.for_model(**described)
        kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = kind.from_config(config)
        counted(sum(parameter.numel() for parameter in model.parameters()))
        optimizer = getattr(torch.optim, settings["optimizer"])(model.parameters(), lr=settings["learning_rate"])
        model.to(device)
        model.train()
        for number in range(settings["iterations"]):
            with phase(str(number)):
                batch = {key: value.to(device) for key, value in trace_inputs(_batch(*shape)).items()}
                outputs = model(**batch)
                outputs.loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    return run


def outcome(settings: Mapping[str, Any], capability: tuple[int, int]) -> Outcome:
    """Return what a GPU would have reserved, and whether it would have run out of memory.

    The figures: ``reserved``, on a GPU of the memory of the row's, less the context, or on one without limit where that
    does not hold it; ``fits``, 1 or 0; ``varied``, what steps of other lengths before the last add where there is room,
    as autotune states it; ``random``, what 32 steps of random lengths add.
    """
    started, counted = time.perf_counter(), list[int]()
    traced = trace(training(settings, counted.append), capability=capability)
    limit_bytes = settings["memory_bytes"][settings["gpu"]] - UNMEASURED_CONTEXT_BYTES
    free = replay(traced, capability=capability).peak_reserved_bytes
    try:
        reserved, fits = replay(traced, capability=capability, limit_bytes=limit_bytes).peak_reserved_bytes, True
    except OutOfMemoryError:
        reserved, fits = free, False
    batch = MicroBatch(settings["rows"], settings["tokens"])
    lengths = steps_before(batch.tokens, 1)
    found = {"reserved": reserved, "fits": int(fits), "varied": _after(traced, batch, lengths, capability) - free}
    seconds = time.perf_counter() - started
    chance = random.Random(0)
    lengths = [(chance.randint(batch.tokens // 2, batch.tokens),) for _ in range(_RANDOM_LENGTHS)]
    found["random"] = _after(traced, batch, lengths, capability) - free
    return Outcome(found, counted[-1], "", seconds)


def _after(traced: Trace, batch: MicroBatch, lengths: list[tuple[int, ...]], capability: tuple[int, int]) -> int:
    """Return the reserved bytes if the last iteration follows others of these lengths."""
    last = traced.phases[-1]
    return replay(varied(traced, last, batch, lengths), capability=capability).peak_reserved_bytes


def _batch(rows: int, tokens: int) -> dict[str, Any]:
    """Return token ids, mask and labels, [rows, tokens], with padding in the last row."""
    mask = np.ones((rows, tokens), dtype=np.int64)
    mask[-1, tokens // 2 :] = 0
    ids = np.full((rows, tokens), _TOKEN, dtype=np.int64)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.copy()}
