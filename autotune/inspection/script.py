"""Finds the TRL classes that a training script uses, by parsing its source without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.core.configuration import MIXTURE, MODEL_CONFIG, SCRIPT_ARGUMENTS
from autotune.errors import InputError
from autotune.trainers import Trainer, trainers

TRL_PARSER = "TrlParser"
"""TRL's parser, which reads a file as well."""
# That, and the parser of transformers that it extends.
_PARSERS = (TRL_PARSER, "HfArgumentParser")
# Names that show that a script reads arguments or keys beyond the classes of its parser.
_PAST_PARSER = frozenset({
    "argv", "add_argument", "parse_known_args", "parse_dict", "parse_json_file", "parse_yaml_file",
    "return_remaining_strings", "fail_with_unknown_args",
})  # fmt: skip
# Functions and classes of PEFT, transformers and Unsloth with which a script creates adapters or loads models itself.
_OWN_MODEL = (
    "LoraConfig", "PeftConfig", "PeftModel", "get_peft_model", "prepare_model_for_kbit_training", "BitsAndBytesConfig",
    "FastLanguageModel", "FastModel", "FastVisionModel",
)  # fmt: skip
# Arguments and methods of trainers by which a script changes what a step needs: other losses, other micro-batches, and
# logits. For metrics of its own, evaluation collects those of all rows on the device (``Trainer.evaluation_loop``).
_OWN_STEP = (
    "compute_loss", "compute_loss_func", "training_step", "data_collator", "formatting_func", "optimizers",
    "rollout_func",
)  # fmt: skip
_OWN_EVALUATION = ("compute_metrics", "prediction_step")
_OF_NO_TRAINER = frozenset({MODEL_CONFIG, MIXTURE})
# Longer scripts are not read.
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Script:
    """A user's own training script.

    Attributes:
        path: as the user wrote it.
        names: all names in its source.
        trainer: name of the only trainer whose class it uses, or else whose configuration; None if there is none.
        unsupported: TRL's class of a trainer that autotune does not know, which it uses in place of a known one; else
            empty.
        takes_more: whether it may take keys that TRL does not have.
    """

    path: str
    names: frozenset[str]
    trainer: str | None
    unsupported: str
    takes_more: bool

    @property
    def parser(self) -> str:
        """The class that reads its words; empty if it uses none of TRL's or transformers'."""
        return next((name for name in _PARSERS if name in self.names), "")

    @property
    def own_model(self) -> str:
        """The first name by which it may make its own adapter, or load its model by itself; empty if it has none."""
        return next((name for name in _OWN_MODEL if name in self.names), "")

    def own_step(self, *, evaluates: bool) -> str:
        """Return the first name by which it may change a step of the trainer; empty if it has none.

        Args:
            evaluates: whether it evaluates while it trains.
        """
        known = (*_OWN_STEP, *(_OWN_EVALUATION if evaluates else ()))
        return next((name for name in known if name in self.names), "")

    @property
    def reads_words(self) -> bool:
        """Whether it may read words past its parser."""
        return not self.names.isdisjoint(_PAST_PARSER)


def read_script(path: str) -> Script:
    """Return a script as its source describes it.

    Raises:
        InputError: it cannot be read, is no Python, or has no code.
    """
    tree = _parsed(Path(path))
    imported, names = _imported_from_trl(tree), frozenset(_names_in(tree))
    trainer, unsupported = _trained(names, frozenset(imported.values()))
    own_keys = trainer is None or not _reads_only_trl(tree, imported, trainer.config_class)
    return Script(
        path,
        names,
        trainer.name if trainer is not None else None,
        unsupported,
        takes_more=own_keys or not names.isdisjoint(_PAST_PARSER),
    )


def _trained(names: frozenset[str], of_trl: frozenset[str]) -> tuple[Trainer | None, str]:
    """Return the only trainer that a script uses, or else TRL's class of one that autotune does not know.

    Args:
        names: all names in the script.
        of_trl: what it imports from TRL.
    """
    known = trainers().values()
    unknown = of_trl - {item.trainer_class for item in known} - {item.config_class for item in known} - _OF_NO_TRAINER
    other_trainer, other_config = _named(unknown, "Trainer"), _named(unknown, "Config")
    used = [item for item in known if item.trainer_class in names]
    if not used and not other_trainer:
        used = [item for item in known if item.config_class in names]
    if used:
        return used[0] if len(used) == 1 else None, ""
    return None, other_trainer or other_config


def _named(classes: Iterable[str], ending: str) -> str:
    """Return the first public class with an ending; empty if there is none."""
    return next((name for name in sorted(classes) if name.endswith(ending) and not name.startswith("_")), "")


def _parsed(script: Path) -> ast.Module:
    """Return the syntax tree of a script.

    Raises:
        InputError: it cannot be read, is no Python, or has no code.
    """
    try:
        if script.stat().st_size > _MOST_BYTES:
            raise InputError(f"{script} is too long to be read.", hint="Give its configuration file instead.")
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"The script {script} cannot be read: {error.strerror}.", hint="Check its path.") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"The script {script} is not Python: {error}.", hint="Give a Python script.") from error
    if all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in tree.body):
        raise InputError(f"The script {script} has no code.", hint="Give the script that trains.")
    return tree


def _imported_from_trl(tree: ast.Module) -> dict[str, str]:
    """Return the classes of TRL that a script imports, by the name that they have in it."""
    return {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.partition(".")[0] == "trl"
        for alias in node.names
    }


def _names_in(tree: ast.Module) -> Iterator[str]:
    """Yield the names in a script: variables, attributes, imports, keywords of calls, and its own functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg


def _reads_only_trl(tree: ast.Module, imported: Mapping[str, str], config_class: str) -> bool:
    """Return whether a script's parser is certain to have classes of TRL alone, as those of TRL's own scripts."""
    redefined = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    own = {name: of_trl for name, of_trl in imported.items() if name not in redefined}
    classes = [own.get(name, "") for node in ast.walk(tree) for name in _classes_of(node)]
    known = {config_class, *_OF_NO_TRAINER}
    return bool(classes) and all(name in known or name.endswith(SCRIPT_ARGUMENTS) for name in classes)


def _classes_of(node: ast.AST) -> Iterator[str]:
    """Yield the names of the classes that a parser is given, if it is built there; an empty one for what has none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _PARSERS:
        for given in (*node.args, *(keyword.value for keyword in node.keywords)):
            for part in given.elts if isinstance(given, ast.Tuple | ast.List) else [given]:
                yield part.id if isinstance(part, ast.Name) else ""
