"""Builds a small model, and a dataset from the Python standard library's documentation; downloads nothing.

    python examples/small_workload.py DIRECTORY [--trainer dpo]

writes ``DIRECTORY/model`` (a Llama with random weights, and a tokenizer trained on the spot) and
``DIRECTORY/data.jsonl`` (one page of documentation per row, in a format of the trainer); for ``distillation`` also
``DIRECTORY/teacher``, a wider model. Its lengths have the long tail that real data has: most pages are a few lines, a
few are very long. The same version of Python writes the same files.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROWS = 400
VOCABULARY = 2048
HIDDEN_SIZE, TEACHER_HIDDEN_SIZE = 96, 192
TRAINERS = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "online_dpo", "distillation")
# In characters. Shorter texts are no documentation; longer ones would make a search take more than a few minutes.
SHORTEST_PAGE, LONGEST_PAGE = 60, 2000
# Not the library's documentation: tests, vendored tools, and packages that pip installed.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}

END_OF_TEXT, PADDING, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(directory: Path, trainer: str = "sft") -> tuple[Path, Path]:
    """Write the workload of a trainer, and return the model's directory and the dataset's file."""
    texts = documentation(ROWS)
    model, data = directory / "model", directory / "data.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts)
    save_model(model, tokenizer)
    if trainer == "distillation":
        save_model(directory / "teacher", tokenizer, TEACHER_HIDDEN_SIZE)
    # Written last, so that a build that was interrupted does not look like a finished one.
    data.write_text("".join(json.dumps(row) + "\n" for row in formatted(texts, trainer)), encoding="utf-8")
    return model, data


def formatted(texts: Sequence[str], trainer: str) -> Iterator[dict[str, str | bool]]:
    """Yield the rows of a trainer's dataset: the better answer is the page itself, the worse one another page."""
    answers = [answer for _, answer in map(question_and_answer, texts)]
    for number, text in enumerate(texts):
        prompt, answer = question_and_answer(text)
        other = answers[number - 1]
        match trainer:
            case "sft":
                yield {"text": text}
            case "dpo" | "reward":
                yield {"prompt": prompt, "chosen": answer, "rejected": other}
            case "kto":
                good = number % 2 == 0
                yield {"prompt": prompt, "completion": answer if good else other, "label": good}
            case _:
                yield {"prompt": prompt}


def question_and_answer(text: str) -> tuple[str, str]:
    """Return a question that a page answers, and the answer."""
    module, _, page = text.partition("\n\n")
    title, _, documented = page.partition("\n")
    return f"What does {title} of {module} do?\n", documented or title


def documentation(rows: int) -> list[str]:
    """Return pages of the standard library's documentation, chosen by the hash of their names."""
    library = Path(sysconfig.get_paths()["stdlib"])
    pages: dict[str, str] = {}
    for file in sorted(library.rglob("*.py")):
        place = file.relative_to(library)
        private = any(part.startswith("_") and part != "__init__.py" for part in place.parts)
        if not private and not SKIPPED_FOLDERS.intersection(place.parts):
            module = ".".join(place.with_suffix("").parts).removesuffix(".__init__")
            pages.update(module_pages(module, ast.parse(file.read_bytes())))
    names = [name for name, page in pages.items() if SHORTEST_PAGE <= len(page) <= LONGEST_PAGE]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    return [pages[name] for name in names[:rows]]


def module_pages(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page of a module: its own, and one for each function and class."""
    documented = ast.get_docstring(tree)
    if documented:
        yield module, f"{module}\n\n{documented}"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            members = node.body if isinstance(node, ast.ClassDef) else []
            functions = [member for member in members if isinstance(member, ast.FunctionDef)]
            page = "\n\n".join(filter(None, map(entry, [node, *functions])))
            if page:
                yield f"{module}.{node.name}", f"{module}\n\n{page}"


def entry(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """Return what is written about a function or class: its signature and docstring, or nothing."""
    documented = ast.get_docstring(node)
    if not documented:
        return ""
    signature = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
    return f"{node.name}{signature}\n{documented}"


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, trained on the texts, with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, PADDING, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=PADDING)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def save_model(directory: Path, tokenizer: PreTrainedTokenizerFast, hidden_size: int = HIDDEN_SIZE) -> None:
    """Write the tokenizer and a model of random weights (0.4 million by default), for training on two CPU cores."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    """Build into the directory that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--trainer", choices=TRAINERS, default="sft", help="whose dataset is written; default: sft")
    asked = parser.parse_args()
    model, data = build(asked.directory, asked.trainer)
    print(f"wrote {model} and {data}")


if __name__ == "__main__":
    main()
