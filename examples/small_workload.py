"""Build a small model and a dataset out of the Python standard library's own documentation; nothing is downloaded.

    python examples/small_workload.py DIRECTORY

writes ``DIRECTORY/model`` (a Llama with random weights, and a tokenizer trained on the spot) and
``DIRECTORY/data.jsonl`` (one page of documentation per row, in TRL's ``text`` format). Its lengths have the long tail
that real data has: most pages are a few lines, a few are very long. The same Python gives the same files.
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
# In characters. Shorter is no documentation; longer than this is a tail that a search of a few minutes cannot afford.
SHORTEST_PAGE, LONGEST_PAGE = 60, 2000
# No part of the library's documentation: tests, vendored tools and what pip installed.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}

END_OF_TEXT, PADDING, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(directory: Path, rows: int = ROWS) -> tuple[Path, Path]:
    """Write the workload and return the model's directory and the dataset's file."""
    texts = documentation(rows)
    model, data = directory / "model", directory / "data.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    save_model(model, train_tokenizer(texts))
    # Written last, so that a build that was interrupted does not look like a finished one.
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return model, data


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


def save_model(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the tokenizer and a model of 0.4 million random weights, small enough to train on two CPU cores."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
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
    model, data = build(parser.parse_args().directory)
    print(f"wrote {model} and {data}")


if __name__ == "__main__":
    main()
