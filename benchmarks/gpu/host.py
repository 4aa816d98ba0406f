"""The host's time per operator, by caller: steps of tiny models whose kernels take almost no time.

python -m benchmarks.gpu.host cuda RESULTS.json [--page PAGE.md]

Writes the times and the numbers of operators of each step as JSON, and a page of all such documents beside it. Needs no
network. Without a GPU, `cpu` does the same, where an operator's kernel belongs to its time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM

from autotune.inspection.machine import machine
from autotune.virtual.operators.callers import CountedCallers

_TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_TOKENS, _RUNS, _FIRST = 8, 15, 3


def _model(kind: str = "qwen2", **options: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_TINY), **options)


def _checkpointed(model: Any, **options: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **options})
    model.enable_input_require_grads()
    return model.train()


def _adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def _steps() -> Iterator[tuple[str, Callable[[], Any], Callable[[], AbstractContextManager[Any]]]]:
    """Yield steps: the name, a function that returns the model, and the context of the forward pass."""
    bf16 = {"dtype": torch.bfloat16}
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    selective = partial(create_selective_checkpoint_contexts, products)
    yield "autocast", _model, nullcontext
    yield "autocast, Llama", partial(_model, "llama"), nullcontext
    yield "eager attention", partial(_model, attn_implementation="eager"), nullcontext
    yield "bf16 weights", partial(_model, **bf16), nullcontext
    yield "checkpointing", lambda: _checkpointed(_model()), nullcontext
    yield "selective checkpointing", lambda: _checkpointed(_model(), context_fn=selective), nullcontext
    yield "LoRA", lambda: _adapted(_model(**bf16)), nullcontext
    yield "LoRA, checkpointing", lambda: _adapted(_checkpointed(_model(**bf16))), nullcontext
    yield "without autograd", _model, torch.no_grad


def measured(device: str) -> dict[str, dict[str, Any]]:
    """Return for each step its seconds and operators, of the forward and of the backward pass."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device=device)
    found = {}
    for name, make, context in _steps():
        model = make().to(device)

        def forward(model: Any = model, context: Any = context) -> torch.Tensor:
            with context(), torch.autocast(device, torch.bfloat16):
                total: torch.Tensor = model(input_ids=tokens, use_cache=False).logits.float().sum()
                return total

        def backward(loss: torch.Tensor) -> None:
            if loss.requires_grad:
                loss.backward()

        times = []
        for _ in range(_FIRST + _RUNS):
            synchronize()
            begun = time.perf_counter()
            loss = forward()
            between = time.perf_counter()
            backward(loss)
            times.append((between - begun, time.perf_counter() - between))
        with CountedCallers(device) as there:
            loss = forward()
        with CountedCallers(device) as back:
            backward(loss)
        passes = zip(("forward", "backward"), (there, back), zip(*times[_FIRST:], strict=True), strict=True)
        found[name] = {
            which: {"seconds": median(seconds), "operators": {caller.value: n for caller, n in counted.counts.items()}}
            for which, counted, seconds in passes
        }
    return found


def page(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of all documents."""
    lines = [
        "# The host's time for an operator",
        "",
        "Steps of models with 4 layers of width 64 on 8 tokens, by `python -m benchmarks.gpu.host`: median of",
        f"{_RUNS} runs, in µs for each operator that has a kernel. On a GPU nothing is waited for; on a CPU the",
        "kernels belong to the time.",
        "`autotune/core/step_time.py` says what follows.",
        "",
    ]
    for document in documents:
        lines += [
            f"## {document['host']}",
            "",
            *([document["note"], ""] if "note" in document else []),
            "| step | forward | backward | operators: forward | backward |",
        ]
        lines += ["|---|--:|--:|---|---|"]
        for name, step in document["steps"].items():
            there, back = step["forward"], step["backward"]
            cells = [f"{_each(part):.1f}" if part["operators"] else "" for part in (there, back)]
            counts = [", ".join(f"{n} {caller}" for caller, n in part["operators"].items()) for part in (there, back)]
            lines.append(f"| {name} | {' | '.join(cells)} | {' | '.join(counts)} |")
        lines.append("")
    return "\n".join(lines)


def _each(part: Mapping[str, Any]) -> float:
    return float(1e6 * part["seconds"] / sum(part["operators"].values()))


def main() -> None:
    """Measure, and write the document and the page of all in its folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("file", type=Path, help="document to write; its name begins with `host-`")
    asked = parser.parse_args()
    host = machine("cpu").hardware.name
    name = f"{torch.cuda.get_device_name()}, {host}" if asked.device == "cuda" else host
    document = {"host": name, "torch": torch.__version__, "steps": measured(asked.device)}
    asked.file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    every = [json.loads(each.read_text(encoding="utf-8")) for each in sorted(asked.file.parent.glob("host-*.json"))]
    asked.file.with_name("host.md").write_text(page(every), encoding="utf-8")


if __name__ == "__main__":
    main()
