"""``autotune.estimate``: predicted memory and time of one existing configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.app.estimate import estimate as traced_estimate
from autotune.core.estimate import MemoryEstimate
from autotune.core.events import Listener, ignore

if TYPE_CHECKING:
    import peft
    import transformers


def estimate(
    model: str,
    config: transformers.TrainingArguments,
    peft_config: peft.PeftConfig | None = None,
    *,
    shape: tuple[int, int],
    gpu: str,
    eval_shape: tuple[int, int] | None = None,
    listener: Listener = ignore,
) -> MemoryEstimate:
    """Predict memory and time of training with a configuration, by tracing its step; no GPU is needed.

    Args:
        model: hub id, local directory, or ``config.json``; no weights are needed.
        config: of one of TRL's trainers, such as a ``trl.DPOConfig``. What it says about a step is traced; where it
            says something that autotune does not understand, that is an error.
        peft_config: as it would be given to the trainer; LoRA alone is understood.
        shape: rows of the largest micro-batch, and tokens of the longest; they stand for the configuration's own sizes.
            One of several rows is taken to be a token shorter, since padding brings an attention mask. With packing or
            padding-free, rows lie end to end.
        gpu: name of a GPU, such as ``H100-80GB``, a size such as ``24GiB``, or ``cpu`` for the CPU's allocator.
        eval_shape: rows of the largest micro-batch of evaluation, and tokens of its longest; None: evaluation is left
            out.
        listener: receives the events of the run.

    Raises:
        InputError: something that was given cannot be used.
        AutotuneError: the step cannot be traced; the message says which operator. A probe can tell, then.
    """
    return traced_estimate(model, config, peft_config, shape, gpu, listener, eval_shape)
