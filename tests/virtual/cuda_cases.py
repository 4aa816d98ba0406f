"""Training steps that must have the same peak in a trace for CUDA and in PyTorch's CUDA build.

``python -m tests.virtual.cuda_cases FILE`` writes the figures of every case as JSON, run on the CUDA device of this
process.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from autotune.virtual import trace
from autotune.virtual.recording.replay import replay
from tests.virtual.models import config_of

ROWS, WIDTH = 256, 1024
BYTES = 2 * ROWS * WIDTH
"""Bytes of one bfloat16 tensor of [ROWS, WIDTH]."""
CAPABILITY = (9, 0)
Step = Callable[[torch.device], None]


def _pointwise(function: Callable[[Tensor], Tensor]) -> Step:
    def step(device: torch.device) -> None:
        given = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
        made = function(given)
        made.backward(torch.empty_like(made))

    return step


def _rms_norm(given: Tensor) -> Tensor:
    weight = torch.ones(WIDTH, dtype=given.dtype, device=given.device, requires_grad=True)
    return functional.rms_norm(given, (WIDTH,), weight)


def _log_probabilities(given: Tensor) -> Tensor:
    index = torch.zeros(ROWS, 1, dtype=torch.int64, device=given.device)
    return given.gather(-1, index).squeeze(-1) - given.logsumexp(-1)


def _first_rows(given: Tensor) -> Tensor:
    return given[torch.arange(ROWS // 2, device=given.device)]


def _biased(device: torch.device) -> None:
    bias = torch.empty(WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
    made = torch.empty(16 * ROWS, WIDTH, dtype=torch.bfloat16, device=device) + bias
    made.backward(torch.empty_like(made))


class SwiGlu(nn.Module):
    """The gated MLP of Llama, behind a norm."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, given: Tensor) -> Tensor:
        """Return [rows, width] of [rows, width]."""
        normed = self.norm(given)
        made: Tensor = given + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return made


def _swiglu(device: torch.device) -> None:
    with device:
        layers = nn.ModuleList(SwiGlu(512, 2048) for _ in range(3)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(2):
        given = torch.empty(4096, 512, dtype=torch.bfloat16, device=device, requires_grad=True)
        for layer in layers:
            given = checkpoint(layer, given, use_reentrant=False)
        given.float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _llama(attention: str, dtype: torch.dtype = torch.bfloat16, **further: Any) -> Step:
    def step(device: torch.device) -> None:
        shape = {"hidden_size": 256, "intermediate_size": 1024, "num_key_value_heads": 4, "vocab_size": 512}
        config = config_of("llama", **{**shape, **further})
        with device:
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            tokens_in = torch.zeros(4, 512, dtype=torch.int64, device=device)
            every = torch.ones(4, 512, dtype=torch.int64, device=device)
            model(input_ids=tokens_in, attention_mask=every, labels=tokens_in, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def _lengths_of_columns(device: torch.device) -> None:
    torch.empty(16 * ROWS, WIDTH, dtype=torch.bfloat16, device=device).norm(dim=0)


def _embedded(device: torch.device) -> None:
    with device:
        embedding = nn.Embedding(2048, WIDTH)
    embedding(torch.zeros(4096, dtype=torch.int64, device=device)).float().mean().backward()


def _placed(device: torch.device) -> None:
    """Put features of images in the place of their tokens, as models with images do."""
    embedded = torch.empty(4, ROWS, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
    features = torch.empty(2 * ROWS, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
    mask = (torch.arange(ROWS, device=device) < ROWS // 2)[:, None].expand(4, ROWS, 1)
    made = embedded.masked_scatter(mask, features)
    made.backward(torch.empty_like(made))


def _drawn(device: torch.device) -> None:
    torch.multinomial(torch.ones(ROWS, WIDTH, device=device), 1)


def _cast(device: torch.device) -> None:
    with device:
        layer = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
    with torch.autocast(device.type, torch.bfloat16):
        layer(torch.empty(ROWS, WIDTH, device=device, requires_grad=True)).float().mean().backward()


def _offloaded(device: torch.device) -> None:
    known = getattr(torch, device.type)
    with known.stream(known.Stream()):
        returned = torch.empty(48 << 20, dtype=torch.uint8, device=device)
    del returned
    torch.empty(48 << 20, dtype=torch.uint8, device=device)


def _emptied(device: torch.device) -> None:
    torch.empty(48 << 20, dtype=torch.uint8, device=device)
    getattr(torch, device.type).empty_cache()
    torch.empty(64 << 20, dtype=torch.uint8, device=device)


CASES: dict[str, Step] = {
    "silu": _pointwise(functional.silu),
    "mish": _pointwise(functional.mish),
    "rms_norm": _pointwise(_rms_norm),
    "swiglu, checkpointed": _swiglu,
    "llama, checkpointed": _llama("sdpa"),
    "llama, eager": _llama("eager"),
    "llama, grouped float32 heads": _llama("sdpa", torch.float32, num_key_value_heads=2),
    "llama, biases": _llama("sdpa", attention_bias=True, mlp_bias=True),
    "softmax": _pointwise(lambda given: given.softmax(-1)),
    "log probabilities": _pointwise(_log_probabilities),
    "largest": _pointwise(lambda given: given.max(-1)[0]),
    "selected": _pointwise(lambda given: given.index_select(0, torch.arange(ROWS // 2, device=given.device))),
    "indexed": _pointwise(_first_rows),
    "bias": _biased,
    "lengths of columns": _lengths_of_columns,
    "embedding": _embedded,
    "layer_norm of another order": _pointwise(lambda given: functional.layer_norm(given.t(), (ROWS,))),
    "images": _placed,
    "drawn": _drawn,
    "cast": _cast,
    "offloaded": _offloaded,
    "emptied": _emptied,
}


def run_case(name: str, device: torch.device) -> None:
    """Run a case; a function that can be handed to another process."""
    CASES[name](device)


def _traced(step: Step) -> dict[str, Any]:
    traced = trace(step, capability=CAPABILITY)
    replayed = replay(traced, capability=CAPABILITY)
    return {
        "tensors": traced.device_peak.bytes,
        "allocated": replayed.peak_allocated_bytes,
        "reserved": replayed.peak_reserved_bytes,
        "sizes": [event.change_bytes for event in traced.events if event.change_bytes > 0],
        "operators": dict(Counter(operator.name for operator in traced.operators)),
    }


def _run(step: Step) -> dict[str, Any]:
    # cuBLAS's workspaces are kept from the first product on; a trace counts them where it first multiplies.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.memory._record_memory_history(context=None, clear_history=True)
    step(torch.device("cuda"))
    history = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return {
        "allocated": torch.cuda.max_memory_allocated() - before,
        "reserved": torch.cuda.max_memory_reserved() - reserved,
        "sizes": [entry["size"] for entry in history if entry["action"] == "alloc"],
    }


def traced_cases() -> dict[str, Any]:
    """Trace every case, and return the figures."""
    return {name: _traced(step) for name, step in CASES.items()}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps({name: _run(step) for name, step in CASES.items()}), encoding="utf-8")
