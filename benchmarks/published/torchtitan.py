"""The training loop of torchtitan's ``train.py`` under FSDP2, for a virtual device; its own model and sharding.

torchtitan, at the commit that its table names, has to be importable. Left out, for they have no part in the figures:
data, learning rate, checkpoints, logging. FSDP2 is that of the installed PyTorch.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from autotune.virtual import phase, trace, trace_inputs
from autotune.virtual.ranks import World
from autotune.virtual.recording.replay import replay
from benchmarks.published.tables import Outcome

_STEPS = 2


def training(settings: Mapping[str, Any], counted: Callable[[int], None]) -> Callable[[torch.device], None]:
    """Return a function of a device that trains for two steps: the optimizer's state appears in the first.

    Args:
        settings: of the table's loop, with those of a row over them.
        counted: is told the number of parameters.
    """
    llama = importlib.import_module("torchtitan.models.llama")
    parallel = importlib.import_module("torchtitan.parallelisms.parallelize_llama")

    def run(device: torch.device) -> None:
        config = llama.llama3_configs[settings["model"]]
        config.vocab_size, config.max_seq_len, config.norm_type = settings["vocabulary"], settings["tokens"], "rmsnorm"
        mesh = init_device_mesh(device.type, (settings["processes"],), mesh_dim_names=("dp_shard_cp",))
        with torch.device("meta"):
            model = llama.Transformer.from_model_args(config)
        counted(sum(parameter.numel() for parameter in model.parameters()))
        parallel.apply_ac(model, SimpleNamespace(**settings["activation_checkpoint"]))
        parallel.apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
        model.to_empty(device=device)
        model.freqs_cis = model._precompute_freqs_cis().to(device)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for number in range(_STEPS):
            with phase(str(number)):
                shape = settings["rows"], settings["tokens"]
                ids, labels = (trace_inputs(torch.zeros(shape, dtype=torch.long)).to(device) for _ in range(2))
                optimizer.zero_grad()
                logits = model(ids)
                loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
                del logits
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
                optimizer.step()

    return run


def outcome(settings: Mapping[str, Any], capability: tuple[int, int]) -> Outcome:
    """Return the reserved bytes of an allocator with segments that can grow."""
    started, counted = time.perf_counter(), list[int]()
    world = World(settings["processes"])
    traced = trace(training(settings, counted.append), capability=capability, world=world)
    found = replay(traced, capability=capability, expandable_segments=True)
    figures: dict[str, float] = {"reserved": found.peak_reserved_bytes, "allocated": found.peak_allocated_bytes}
    return Outcome(figures, counted[-1], "", time.perf_counter() - started)
