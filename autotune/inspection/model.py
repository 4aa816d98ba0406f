"""Resolves and checks the user's model, a hub id or a local path, without reading large files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.core.files.json_text import read_json
from autotune.core.workload import Init, ModelSource
from autotune.errors import InputError, UnreadError
from autotune.inspection.paths import local_path, unreadable

CONFIG_FILE = "config.json"
_ADAPTER_FILE = "adapter_config.json"
# The files of transformers' tokenizers: fast ones, their configuration, SentencePiece, BPE and WordPiece vocabularies,
# and Mistral's own format.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_CONFIG_HINT = "`autotune plan --seq-len` takes a configuration alone, in a file of any name."
_FILE_SUFFIXES = frozenset({".json", ".safetensors", ".bin", ".gguf", ".pt", ".pth"})


def model_source(text: str | Path, init: Init, *, tokenizes: bool = True, loads_adapters: bool = False) -> ModelSource:
    """Return the source of a model named by a local directory, a ``config.json``, or a hub id (not checked here).

    Args:
        tokenizes: whether rows will be tokenised. If not, no tokenizer is needed, and the configuration may be a file
            of any name.
        loads_adapters: whether TRL loads an adapter's directory, with the model that it names.

    Raises:
        UnreadError: TRL would load a PEFT adapter.
        InputError: the path does not exist, or has no model or no tokenizer.
    """
    text = str(text)
    path = local_path(text, "model", _FILE_SUFFIXES)
    if path is None:
        return ModelSource(name=text, init=init)
    try:
        return _local_source(path, init, tokenizes=tokenizes, loads_adapters=loads_adapters)
    except OSError as error:
        raise unreadable("model", text, error) from error


def _local_source(path: Path, init: Init, *, tokenizes: bool, loads_adapters: bool) -> ModelSource:
    if not tokenizes and path.is_file() and path.name != CONFIG_FILE:
        return ModelSource(name=str(path), init=init, tokenizer=False)
    directory = _directory(path, loads_adapters=loads_adapters)
    tokenizer = any((directory / name).is_file() for name in TOKENIZER_FILES)
    if tokenizes and not tokenizer:
        raise InputError(
            f"{directory} has no tokenizer.",
            hint=f"Save one next to {CONFIG_FILE}; looked for {', '.join(TOKENIZER_FILES)}. {_CONFIG_HINT}",
        )
    return ModelSource(name=str(directory), init=init, tokenizer=tokenizer)


def _directory(path: Path, *, loads_adapters: bool) -> Path:
    if path.is_file():
        if path.name != CONFIG_FILE:
            raise InputError(
                f"{path} is a file, but no {CONFIG_FILE}.",
                hint=f"Give the model's directory, its {CONFIG_FILE}, or a hub id. {_CONFIG_HINT}",
            )
        path = path.parent
    if not path.is_dir():
        raise InputError(f"{path} is neither a directory nor a file.", hint="Give the model's directory or a hub id.")
    has_model = (path / CONFIG_FILE).is_file()
    if (path / _ADAPTER_FILE).is_file():
        if has_model:  # `maybe_load_adapters` of transformers
            raise UnreadError(
                f"{path} has a model and a PEFT adapter. transformers would load both, which autotune does not plan or"
                " probe.",
                hint=f"Give the model alone, without {_ADAPTER_FILE}.",
            )
        raise adapter_alone(str(path), path / _ADAPTER_FILE, loads=loads_adapters)
    if not has_model:
        raise InputError(f"{path} has no {CONFIG_FILE}.", hint="Give the directory that the model was saved in.")
    return path


def adapter_alone(name: str, file: Path, *, loads: bool) -> InputError:
    """Return the error for an adapter without its model.

    Args:
        file: the adapter's configuration.
        loads: whether TRL loads it, with the model that it names.
    """
    base_model = _read_config(file).get("base_model_name_or_path")
    hint = f"It was trained on {base_model}: give that." if base_model else "Give the model that it was trained on."
    return (UnreadError if loads else InputError)(f"{name} holds a PEFT adapter, not a model.", hint=hint)


def _read_config(file: Path) -> Mapping[str, object]:
    """Return the fields of a configuration; none if the file has no JSON object."""
    try:
        config = read_json(file.read_text(encoding="utf-8"), finite=False)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # json.JSONDecodeError and UnicodeDecodeError are both ValueErrors
        raise InputError(f"{file} is not JSON: {error}.", hint="Save the model's configuration again.") from error
    return config if isinstance(config, dict) else {}
