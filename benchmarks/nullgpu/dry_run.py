"""Compares dry runs with traces of the same trainings, and prints rows of the table in ``docs/dry-run.md``.

Run ``.venv-cuda/bin/python -m benchmarks.nullgpu.dry_run``: it needs PyTorch's CUDA build, and no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.nullgpu.devices import null_device
from autotune.nullgpu.environment import environment
from benchmarks.common import chosen, start_on_null_gpu
from benchmarks.shapes import write_rows

_GPU = "H100-80GB"
_EXAMPLES = Path(__file__).parents[2] / "examples" / "dry_run"
_BIN = Path(sys.executable).parent
_VOCABULARY = 512
_LENGTHS = range(294, 925, 10)
_SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
_LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
_SFT = {"per_device_train_batch_size": 4, "report_to": "none"}
_GRPO = {
    **_SFT,
    "num_generations": 4,
    "max_completion_length": 48,
    "beta": 0.04,
    "reward_funcs": ["get_soft_overlong_punishment"],
}


@dataclass(frozen=True)
class Case:
    """A training that is run dry and traced.

    Attributes:
        name: what it trains, for the table.
        model: changes of a small Llama's configuration.
        launch: further words of the command.
        script: what is run dry in the place of TRL's own, and gets the model and a folder.
    """

    name: str
    trainer: str
    model: Mapping[str, Any]
    arguments: Mapping[str, Any]
    launch: tuple[str, ...] = ()
    script: Path | None = None


@dataclass
class Bench:
    """Models, rows and configurations in a folder; each model is written once."""

    folder: Path
    _models: dict[str, Path] = field(default_factory=dict)

    def words(self, case: Case) -> tuple[list[str], list[str]]:
        """Return the command that is run dry, and that which is traced."""
        rows = self.folder / f"{case.trainer}-rows"
        if not rows.exists():
            rows.mkdir()
            _write_rows(case.trainer, rows / "train.jsonl")
        model = self._model(case.model)
        written = {"model_name_or_path": str(model), "dataset_name": str(rows), "output_dir": str(self.folder / "out")}
        file = self.folder / f"{case.trainer}-{model.name}.yaml"
        # YAML is a superset of JSON.
        file.write_text(json.dumps({**written, **case.arguments}), encoding="utf-8")
        traced = [str(_BIN / "trl"), case.trainer, "--config", str(file), *case.launch]
        own = [sys.executable, str(case.script), str(model), str(self.folder / "out")]
        return (own if case.script else traced), traced

    def _model(self, changes: Mapping[str, Any]) -> Path:
        from tests.nullgpu.sparse import write_sparse
        from tests.small import small_config, small_tokenizer

        known = json.dumps(changes)
        if known not in self._models:
            self._models[known] = folder = self.folder / f"model-{len(self._models)}"
            folder.mkdir()
            write_sparse(folder, small_config(**changes))
            small_tokenizer().save_pretrained(folder)
        return self._models[known]


def cases() -> Iterator[Case]:
    """Yield the compared trainings."""
    large = {**_LARGE, "num_key_value_heads": 4, "vocab_size": 32000, "tie_word_embeddings": False}
    small = {**_SMALL, "num_key_value_heads": 4}
    fsdp2 = ("--accelerate_config", str(_EXAMPLES / "fsdp2.yaml"))
    yield Case("`trl sft`, a Llama of 1.1B parameters, 4 rows of 924 tokens", "sft", large, _SFT)
    yield Case("`trl sft`, a Llama of 13M parameters, the same rows", "sft", small, _SFT)
    yield Case("`trl sft` by FSDP2 on two, the same on each", "sft", small, _SFT, launch=fsdp2)
    name = "`examples/dry_run/grpo.py` with that model, 4 completions"
    yield Case(name, "grpo", small, _GRPO, script=_EXAMPLES / "grpo.py")


def compared(case: Case, bench: Bench) -> str:
    """Run a case dry, trace it, and return its row."""
    command, words = bench.words(case)
    run = _document(["dry-run", "--gpu", _GPU, "--json", "--", *command], os.environ)
    spans = [span for process in run["processes"] for span in process["spans"]]
    memory = traced(words, max(span["reserved_bytes"] + span["non_pytorch_bytes"] for span in spans))
    figures = [
        (max(span[f"{name}_bytes"] for span in spans), memory[trace])
        for name, trace in (("allocated", "peak_bytes"), ("reserved", "reserved_bytes"))
    ]
    cells = (f"{ran:,} | {told:,} | {told / ran - 1:+.2%}" for ran, told in figures)
    return f"| {case.name} | {' | '.join(cells)} |"


def traced(words: list[str], need_bytes: int) -> dict[str, Any]:
    """Return the memory that ``autotune check`` traces for a command, on a GPU like the null GPUs.

    Args:
        need_bytes: the budget is a fifth above it, so near that all layers are traced.
    """
    # A trace takes a device of its own, and PyTorch's CUDA build the library in which there is none.
    variables = environment(null_device(_GPU))
    del variables["NULLGPU_DEVICE"]
    memory: dict[str, Any] = _document(
        ["check", "--gpu", _GPU, "--memory-budget", f"{need_bytes * 6 // 5 >> 20}MiB", "--json", "--", *words],
        variables,
    )["need"]["memory"]
    return memory


def _write_rows(trainer: str, file: Path) -> None:
    if trainer == "sft":
        write_rows(file, _LENGTHS, _VOCABULARY)
        return
    prompts = runpy.run_path(str(_EXAMPLES / "grpo.py"))["prompts"]()
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")


def _document(words: list[str], variables: Mapping[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "autotune", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**variables, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases whose name has one of these words")
    asked = parser.parse_args()
    start_on_null_gpu("benchmarks.nullgpu.dry_run", _GPU)
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        for case in chosen(cases(), asked.only):
            print(compared(case, bench), flush=True)


if __name__ == "__main__":
    main()
