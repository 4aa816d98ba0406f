"""TRL's SFT on one or several ranks, traced by the job that ``autotune plan`` runs, for tables of measured trainings.

Rows are full: each has the tokens of the table, and the trainer neither cuts nor packs them. Models of older releases
built logits and computed the loss from them: where a row names that release of transformers, its loss takes the place
of TRL's fused head.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from autotune.core.jobs.traced import TraceRequest
from autotune.core.plan import Launch, TrainingPlan
from autotune.inspection.gpus import find_gpu
from autotune.inspection.model import model_source
from autotune.step.job import JobContext
from autotune.step.jobs.trace import trace
from benchmarks.common import whole_step
from benchmarks.published.tables import Outcome
from benchmarks.shapes import write_model

_IGNORED = -100


def outcome(settings: Mapping[str, Any], _: tuple[int, int]) -> Outcome:
    """Trace a row, of the settings of the loop with its own over them.

    The figures: ``allocated`` and ``reserved``, the peaks of PyTorch's allocator in bytes; ``step``, the seconds of an
    optimizer step.
    """
    started = time.perf_counter()
    args = {**settings["args"], "max_length": settings["tokens"], "per_device_train_batch_size": settings["rows"]}
    if settings["processes"] > 1:
        args |= settings["engine"]
    plan = TrainingPlan("sft", args, settings["weights"], launch=Launch(settings["processes"]))
    rows = ((settings["tokens"],),) * settings["rows"]
    with tempfile.TemporaryDirectory() as name, _loss_of(settings["loss"]):
        folder = Path(name)
        source = model_source(write_model(folder / "model", settings["models"][settings["model"]]), "random")
        request = TraceRequest(plan, source, "cuda", rows, gpu=find_gpu(settings["gpu"]))
        reply = trace(request, JobContext(folder, time.monotonic()))
    replayed, step = reply.own.replays[0], whole_step(plan, reply)
    figures: dict[str, float] = {"allocated": replayed.allocated_bytes, "reserved": replayed.reserved_bytes or 0}
    if step is not None:
        figures["step"] = step.seconds
    return Outcome(figures, seconds=time.perf_counter() - started)


def _loss_of(release: str) -> AbstractContextManager[object]:
    """Return a context in which TRL trains with its own fused head, or with the loss of a release of transformers."""
    if release == "trl":
        return nullcontext()
    import trl.trainer.sft_trainer as sft

    return mock.patch.object(sft, "add_fused_lm_head", functools.partial(_with_logits, release))


def _with_logits(release: str, model: Any, **_: Any) -> None:
    """Make a model return what TRL's fused head returns, by the loss of a release of transformers 4.

    That of 4.48 (``ForCausalLMLoss``) has logits in float32 beside those in bf16, and a copy of all but the last
    token's. Models of 4.45 keep none in bf16.
    """
    from trl.trainer.utils import FusedCausalLMOutput

    forward = model.forward

    @functools.wraps(type(model).forward)
    def plain(_: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **inputs: Any) -> Any:
        inputs.pop("num_items_in_batch", None)
        found = forward(*args, **inputs)
        if not fused_lm_head:
            return found
        logits = found.logits.float()
        if release == "4.45":
            del found
        shifted, targets = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        losses = functional.cross_entropy(shifted.flatten(0, 1), targets.flatten(), reduction="none")
        mask, nothing = targets != _IGNORED, torch.zeros_like(targets)
        return FusedCausalLMOutput(
            log_probs=-losses.view_as(targets), label_mask=mask, entropy=nothing.float(), is_top1=nothing
        )

    model.forward = MethodType(plain, model)
