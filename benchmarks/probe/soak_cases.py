"""The cases of ``benchmarks.probe.soak``: trainer, family of models, shape of the rows, and budget."""

from __future__ import annotations

import ast
import hashlib
import json
import random
import runpy
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.shapes import SMALL_WORKLOAD
from tests.vision import FAMILIES as PICTURED
from tests.vision import write_small_vision_model

ROWS = 400
_EXAMPLE = runpy.run_path(str(SMALL_WORKLOAD))
"""The definitions in the examples' script."""
_EVALUATED_ROWS = 40
JOINED_ROWS = 8
_TENTH = 10
_LINES = 4
"""Of a short text: the name of the module, an empty one, the title, and the first of what is written about it."""
_SHORTEST, _LONGEST = 60, 4000
"""Characters of a function's source."""
_PIXELS = (24, 120)
"""Sides of an image: the smallest and the largest."""
_SIZES: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_TOKENS = 32
"""Of each completion: a model of random weights hardly ever ends one by itself."""
_ANSWERS = {"max_completion_length": _TOKENS, "num_generations": 4}
_REWARDED = {"reward_funcs": ["examples.rewards.brevity"], "completion_length": _TOKENS}
_FURTHER: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"fix": _ANSWERS, **_REWARDED},
    "rloo": {"fix": _ANSWERS, **_REWARDED},
    "online_dpo": {"fix": {"max_new_tokens": _TOKENS}, **_REWARDED},
    "distillation": {"fix": {"max_completion_length": _TOKENS}, "completion_length": _TOKENS},
}
"""Further arguments of a search, by trainer."""


@dataclass(frozen=True)
class Case:
    """What is searched and trained.

    Attributes:
        family: transformers' type of the model; one with a vision tower is trained on images.
        budget: of memory, for each process.
        rows: their shape: ``pages`` of Python's documentation, the same with a tail of ``long`` ones, their first lines
            (``short``), conversations of one to five questions about them (``chat``), or the source ``code`` of
            Python's functions.
        processes: ranks that train together.
        allow: knobs that change training.
    """

    trainer: str
    family: str
    budget: str
    rows: Literal["pages", "long", "short", "chat", "code"] = "pages"
    processes: int = 1
    allow: Sequence[str] = field(default=())

    @property
    def name(self) -> str:
        """A unique name."""
        shape = "" if self.rows == "pages" else f", {self.rows}"
        ranks = f" on {self.processes} ranks" if self.processes > 1 else ""
        return f"{self.trainer} {self.family}{shape}{ranks}{''.join(f' with {knob}' for knob in self.allow)}"

    @property
    def evaluates(self) -> bool:
        """Whether there is an evaluation: TRL's OnlineDPOTrainer cannot be evaluated while it trains."""
        return self.trainer != "online_dpo"

    @property
    def options(self) -> dict[str, Any]:
        """Further arguments of :func:`autotune.probe`."""
        ranks = {"num_processes": self.processes} if self.processes > 1 else {}
        allowed = {"allow": [*self.allow]} if self.allow else {}
        return {**_FURTHER.get(self.trainer, {}), **ranks, **allowed}


CASES: Sequence[Case] = (
    Case("sft", "llama", "250MiB"),
    Case("sft", "qwen3", "500MiB", "long"),
    Case("sft", "gemma3_text", "400MiB"),
    Case("sft", "llama", "400MiB", "long", allow=["lora"]),
    Case("dpo", "llama", "400MiB"),
    Case("dpo", "qwen3", "800MiB", "long"),
    Case("dpo", "gemma3_text", "700MiB", allow=["lora"]),
    Case("kto", "llama", "660MiB"),
    Case("kto", "qwen3", "2000MiB", "long"),
    Case("reward", "llama", "250MiB"),
    Case("reward", "qwen3", "500MiB", "long"),
    Case("grpo", "llama", "300MiB"),
    Case("grpo", "gemma3_text", "300MiB"),
    Case("rloo", "qwen3", "300MiB"),
    Case("distillation", "llama", "300MiB"),
    Case("sft", "gemma3", "260MiB"),
    Case("dpo", "gemma3", "600MiB"),
    Case("sft", "llama", "390MiB", "code", processes=2),
    Case("online_dpo", "llama", "300MiB"),
    Case("grpo", "gemma3", "300MiB"),
    Case("distillation", "qwen3", "75MiB"),
    Case("sft", "mistral", "410MiB", "code"),
    Case("dpo", "olmo2", "400MiB"),
    Case("reward", "phi3", "500MiB", "long"),
    Case("rloo", "llava_next", "300MiB"),
    Case("dpo", "llama", "400MiB", processes=2),
    Case("grpo", "llama", "300MiB", processes=2),
    Case("kto", "mistral", "800MiB", "code"),
    Case("sft", "olmo2", "400MiB", "chat"),
    Case("sft", "qwen2", "150MiB", "short"),
    Case("sft", "granite", "500MiB", "long"),
    Case("sft", "qwen3", "390MiB", "code", processes=2),
    Case("sft", "idefics3", "260MiB"),
    Case("sft", "mistral", "400MiB", "chat", allow=["lora", "quantization"]),
    Case("dpo", "qwen2", "700MiB", "chat"),
    Case("dpo", "mistral", "500MiB", "code"),
    Case("dpo", "olmo2", "700MiB", "long", allow=["lora"]),
    Case("dpo", "llava_next", "600MiB"),
    Case("kto", "olmo2", "400MiB", "short"),
    Case("kto", "gemma3", "600MiB"),
    Case("kto", "qwen3", "800MiB", processes=2),
    Case("reward", "gemma3_text", "400MiB", "chat"),
    Case("reward", "llama", "300MiB", "code", processes=2),
    Case("grpo", "qwen3", "900MiB", "chat"),
    Case("grpo", "olmo2", "300MiB", "code"),
    Case("rloo", "llama", "250MiB", "short"),
    Case("rloo", "mistral", "300MiB", processes=2),
    Case("distillation", "mistral", "200MiB", "code"),
    Case("distillation", "qwen2", "300MiB", processes=2),
    Case("online_dpo", "qwen3", "900MiB", "chat"),
)


def workload(case: Case, folder: Path) -> dict[str, Any]:
    """Write rows and models of random weights; return the arguments of :func:`autotune.probe` that name them."""
    pictured = case.family in PICTURED
    texts = functions(ROWS) if case.rows == "code" else _EXAMPLE["documentation"](ROWS)
    if case.rows == "short":
        texts = ["\n".join(text.splitlines()[:_LINES]) for text in texts]
    rows: list[dict[str, Any]] = list(_EXAMPLE["formatted"](texts, case.trainer))
    if case.rows == "chat":
        rows = [*chats(rows, texts)]
    if case.rows == "long":
        rows = [
            joined(rows[place : place + JOINED_ROWS]) if place % _TENTH == 0 else row for place, row in enumerate(rows)
        ]
    named = {"model": folder / "model"}
    if pictured:
        write_small_vision_model(folder / "model", case.family)
        rows = [*with_images(rows, folder)]
    else:
        tokenizer = _EXAMPLE["train_tokenizer"](texts)
        _save(case.family, tokenizer, folder / "model")
        if case.trainer == "distillation":
            named["teacher"] = folder / "teacher"
            _EXAMPLE["save_model"](folder / "teacher", tokenizer, 2 * _SIZES["hidden_size"])
    parts = {"dataset": rows[:-_EVALUATED_ROWS]}
    if case.evaluates:
        parts["eval_dataset"] = rows[-_EVALUATED_ROWS:]
    for name, part in parts.items():
        named[name] = folder / f"{name}.{'parquet' if pictured else 'jsonl'}"
        _write(part, named[name])
    return named


def chats(rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows as conversations, each after none to four questions and answers about other texts."""
    chance = random.Random(0)
    for row, text in zip(rows, texts, strict=True):
        earlier = [_EXAMPLE["question_and_answer"](other) for other in chance.sample(texts, chance.randrange(5))]
        before = [turn for ask, answer in earlier for turn in (*_said("user", ask), *_said("assistant", answer))]
        if "text" in row:
            asked, answer = _EXAMPLE["question_and_answer"](text)
            yield {"messages": [*before, *_said("user", asked), *_said("assistant", answer)]}
        else:
            spoken = conversation(row)
            yield {**spoken, "prompt": [*before, *spoken["prompt"]]}


def functions(rows: int) -> list[str]:
    """Return the source of functions of Python's library, in the form of the pages of its documentation."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = {}
    for file in sorted(library.glob("*.py")):
        if file.stem in _EXAMPLE["SKIPPED_FOLDERS"]:
            continue
        source = file.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                text = ast.get_source_segment(source, node) or ""
                if _SHORTEST <= len(text) <= _LONGEST:
                    found[f"{file.stem}.{node.name}"] = f"{file.stem}\n\n{node.name}\n{text}"
    names = sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [found[name] for name in names[:rows]]


def joined(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first row with the texts of all: the prompt is its own."""
    return {
        name: "\n".join(str(row[name]) for row in rows) if isinstance(value, str) and name != "prompt" else value
        for name, value in rows[0].items()
    }


def with_images(rows: Sequence[Mapping[str, Any]], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows as conversations, each with one image or two of chance sizes and pixels."""
    import numpy as np
    from PIL import Image

    chance, pixels = random.Random(0), np.random.default_rng(0)
    for number, row in enumerate(rows):
        images = []
        for place in range(chance.choice((1, 1, 2))):
            sides = (chance.randint(*_PIXELS), chance.randint(*_PIXELS), 3)
            images.append(str(folder / f"{number}-{place}.png"))
            Image.fromarray(pixels.integers(256, size=sides, dtype=np.uint8)).save(images[-1])
        yield {**conversation(row), "images": images}


def conversation(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in TRL's conversational format."""
    if "text" in row:
        return {"messages": [*_said("user", "What is this?"), *_said("assistant", row["text"])]}
    return {
        name: _said("user" if name == "prompt" else "assistant", value) if isinstance(value, str) else value
        for name, value in row.items()
    }


def _said(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _write(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return
    from datasets import Dataset, Image, List

    Dataset.from_list([*map(dict, rows)]).cast_column("images", List(Image())).to_parquet(str(file))


def _save(family: str, tokenizer: Any, folder: Path) -> None:
    """Write a model of random weights, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **_SIZES, **tokens)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
