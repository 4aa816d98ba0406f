"""The training loop of PEFT's method comparison on MetaMathQA, for a virtual device.

It follows ``train`` of ``method_comparison/MetaMathQA/run.py`` and ``get_model`` and ``get_optimizer_and_scheduler`` of
``utils.py`` beside it. Left out, for they have no part in the figures: reading the data, evaluation, logging.

``foreach`` is spelled out: PyTorch chooses it by itself for CUDA, but only where a parameter is of the very classes
that it knows (``torch.optim.optimizer._default_to_fused_or_foreach``), which one without storage is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import peft
import torch
from peft.optimizers import create_lorafa_optimizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from autotune.virtual import phase, trace_inputs
from benchmarks.published.measure import Shown, measured
from benchmarks.published.tables import Outcome

STEPS = ("average", "longest")
"""Names of the phases: the micro-batch after which memory is read, and the one that reaches the peak."""
_TOKEN, _IGNORED = 5, -100
# Methods whose ranks are reallocated after each step (``is_adalora``, ``is_adamss`` in run.py).
_REALLOCATED = (peft.AdaLoraConfig,)


def training(settings: Mapping[str, Any], counted: Callable[[int], None]) -> Callable[[torch.device], None]:
    """Return a function of a device that trains for two steps, one for each of :data:`STEPS`.

    Args:
        settings: of the table's loop, with those of a row over them.
        counted: is told the number of trainable parameters.
    """

    def run(device: torch.device) -> None:
        model = _model(settings, device)
        optimizer = _optimizer(settings, model)
        counted(sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))
        model.eval()
        if settings["adapter"] is not None:
            # Around the loss on Wikipedia before training. What has no gradient may have one afterwards.
            with model.disable_adapter():
                pass
        model.train()
        _never_drop(model)
        for step, name in enumerate(STEPS, start=1):
            with phase(name):
                lengths = settings[f"{name}_lengths"]
                batch = {key: value.to(device) for key, value in trace_inputs(_batch(lengths)).items()}
                optimizer.zero_grad()
                outputs = model(**batch, num_items_in_batch=sum(lengths))
                loss = outputs.loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_grad_norm"], foreach=True)
                optimizer.step()
                if isinstance(getattr(model, "peft_config", {}).get("default"), _REALLOCATED):
                    model.base_model.update_and_allocate(step)

    return run


def outcome(settings: Mapping[str, Any], capability: tuple[int, int]) -> Outcome:
    """Trace a row, of the settings of the loop with its own over them."""
    return measured(training, figures, settings, capability)


def figures(shown: Shown) -> dict[str, int]:
    """Return the table's figures of a traced run."""
    return {"reserved": shown.peak_reserved_bytes, "allocated": shown.allocated_bytes[STEPS[0]]}


def _model(settings: Mapping[str, Any], device: torch.device) -> Any:
    config = LlamaConfig(**settings["model"])
    with torch.device("meta"):
        size = LlamaForCausalLM(config).num_parameters()
    # from_pretrained takes room for all weights at once and gives it back to the cache
    # (transformers/modeling_utils.py, caching_allocator_warmup).
    room = torch.empty(size, dtype=torch.bfloat16, device=device)
    del room
    with device, no_init_weights():
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    if settings["adapter"] is None:
        return model
    adapter = peft.PeftConfig.from_peft_type(**settings["adapter"])
    return peft.get_peft_model(model, adapter, autocast_adapter_dtype=settings.get("autocast_adapter_dtype", True))


def _optimizer(settings: Mapping[str, Any], model: Any) -> torch.optim.Optimizer:
    if settings["optimizer_type"] == "lora-fa":
        return create_lorafa_optimizer(model, **settings["optimizer_kwargs"])
    kind: Any = getattr(torch.optim, settings["optimizer_type"])
    optimizer: torch.optim.Optimizer = kind(model.parameters(), foreach=True, **settings["optimizer_kwargs"])
    return optimizer


def _never_drop(model: Any) -> None:
    """Have LoHa and LoKr take their whole modules: they ask ``torch.rand(1) > 0``, which a trace cannot know."""
    for module in model.modules():
        probabilities = getattr(module, "module_dropout", None)
        if isinstance(probabilities, dict) and not any(probabilities.values()):
            module.training = False


def _batch(lengths: Sequence[int]) -> dict[str, Any]:
    """Return token ids, mask and labels, [samples, longest], padded on the right; one padding token has a label."""
    shape = len(lengths), max(lengths)
    mask = np.arange(shape[1]) < np.asarray(lengths)[:, None]
    labelled = np.arange(shape[1]) < np.asarray(lengths)[:, None] + 1
    return {
        "input_ids": np.full(shape, _TOKEN, dtype=np.int64),
        "attention_mask": mask.astype(np.int64),
        "labels": np.where(labelled, _TOKEN, _IGNORED),
    }
