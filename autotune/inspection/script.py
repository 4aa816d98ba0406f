"""Finds the TRL classes that a training script uses, from its syntax tree; the script is not run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.core.configuration import MIXTURE, MODEL_CONFIG, SCRIPT_ARGUMENTS
from autotune.errors import InputError
from autotune.trainers import trainers

if TYPE_CHECKING:
    # Any command's help reads this module, and needs no trainer.
    from autotune.trainers.base import Trainer

TRL_PARSER = "TrlParser"
"""TRL's parser of arguments and of ``--config FILE``; it extends that of transformers."""
_PARSERS = (TRL_PARSER, "HfArgumentParser")
# A script with one of these names may read arguments or keys that the classes of its parser do not have.
_EXTRA_ARGUMENTS = frozenset({
    "argv", "add_argument", "parse_known_args", "parse_dict", "parse_json_file", "parse_yaml_file",
    "return_remaining_strings", "fail_with_unknown_args",
})  # fmt: skip
# Functions and classes of PEFT, transformers and Unsloth by which a script creates adapters or loads models itself.
_MODEL_CALLS = (
    "LoraConfig", "PeftConfig", "PeftModel", "get_peft_model", "prepare_model_for_kbit_training", "BitsAndBytesConfig",
    "FastLanguageModel", "FastModel", "FastVisionModel",
)  # fmt: skip
# Arguments and methods of trainers by which a script changes the loss or the micro-batches of a step, and those that
# change evaluation: for compute_metrics, the logits of all rows are kept on the device (``Trainer.evaluation_loop``).
_STEP_NAMES = (
    "compute_loss", "compute_loss_func", "training_step", "data_collator", "formatting_func", "optimizers",
    "rollout_func",
)  # fmt: skip
_EVALUATION_NAMES = ("compute_metrics", "prediction_step")
_SHARED_CLASSES = frozenset({MODEL_CONFIG, MIXTURE})
_TRL = "trl"
# Packages whose trainers are no changed copies of TRL's.
_KNOWN_PACKAGES = (_TRL, "transformers")
# Longer scripts are not read.
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Script:
    """A user's own training script.

    Attributes:
        path: as the user wrote it.
        names: all names in its source.
        trainer: name of the only trainer whose class, or else whose configuration class, it uses; None without one.
        unsupported: TRL's class of an unsupported trainer that it uses instead; else empty.
        takes_more: whether it may accept keys that TRL does not have.
        foreign: a trainer's class that it imports from neither TRL nor transformers; else empty.
    """

    path: str
    names: frozenset[str]
    trainer: str | None
    unsupported: str
    takes_more: bool
    foreign: str = ""

    @property
    def parser(self) -> str:
        """TRL's or transformers' class that parses its arguments; empty without one."""
        return next((name for name in _PARSERS if name in self.names), "")

    @property
    def own_model(self) -> str:
        """The first name in it that may create an adapter or load a model; empty without one."""
        return next((name for name in _MODEL_CALLS if name in self.names), "")

    def own_step(self, *, evaluates: bool) -> str:
        """Return the first name in it that may change a training step; empty without one.

        Args:
            evaluates: whether the training evaluates, so that evaluation counts too.
        """
        changing = (*_STEP_NAMES, *(_EVALUATION_NAMES if evaluates else ()))
        return next((name for name in changing if name in self.names), self.foreign)

    @property
    def reads_words(self) -> bool:
        """Whether it may read arguments without its parser."""
        return not self.names.isdisjoint(_EXTRA_ARGUMENTS)


def read_script(path: str) -> Script:
    """Return a script by its syntax tree.

    Raises:
        InputError: it cannot be read, is not Python, or has no code.
    """
    tree = _parse(Path(path))
    imported, names = _imported(tree, _TRL), frozenset(_names_in(tree))
    trainer, unsupported = _trainer_used(names, frozenset(imported.values()))
    own_keys = trainer is None or not _reads_only_trl(tree, imported, trainer.config_class)
    return Script(
        path,
        names,
        trainer.name if trainer is not None else None,
        unsupported,
        takes_more=own_keys or not names.isdisjoint(_EXTRA_ARGUMENTS),
        foreign=_first_public(set(_imported(tree)) - set(_imported(tree, *_KNOWN_PACKAGES)), "Trainer"),
    )


def _trainer_used(names: frozenset[str], of_trl: frozenset[str]) -> tuple[Trainer | None, str]:
    """Return the only trainer that a script uses, or else TRL's class of an unsupported trainer.

    Args:
        names: all names in the script.
        of_trl: the names that it imports from TRL.
    """
    known = trainers().values()
    unknown = of_trl - {item.trainer_class for item in known} - {item.config_class for item in known} - _SHARED_CLASSES
    other_trainer, other_config = _first_public(unknown, "Trainer"), _first_public(unknown, "Config")
    used = [item for item in known if item.trainer_class in names]
    if not used and not other_trainer:
        used = [item for item in known if item.config_class in names]
    if used:
        return used[0] if len(used) == 1 else None, ""
    return None, other_trainer or other_config


def _first_public(classes: Iterable[str], ending: str) -> str:
    """Return the first public class with an ending; empty without one."""
    return next((name for name in sorted(classes) if name.endswith(ending) and not name.startswith("_")), "")


def _parse(script: Path) -> ast.Module:
    """Return the syntax tree of a script.

    Raises:
        InputError: it cannot be read, is not Python, or has no code.
    """
    try:
        if script.stat().st_size > _MAX_BYTES:
            raise InputError(f"{script} is too long to be read.", hint="Give its configuration file instead.")
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"The script {script} cannot be read: {error.strerror}.", hint="Check its path.") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"The script {script} is not Python: {error}.", hint="Give a Python script.") from error
    if all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in tree.body):
        raise InputError(f"The script {script} has no code.", hint="Give the script that trains.")
    return tree


def _imported(tree: ast.Module, *packages: str) -> dict[str, str]:
    """Return the names that a script imports from some packages, or from any, by their name in the script."""
    return {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (not packages or (node.module is not None and node.module.partition(".")[0] in packages))
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
    """Return whether all classes of a script's parser are certain to be TRL's, as in TRL's own scripts."""
    redefined = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    own = {name: of_trl for name, of_trl in imported.items() if name not in redefined}
    classes = [own.get(name, "") for node in ast.walk(tree) for name in _parser_classes(node)]
    known = {config_class, *_SHARED_CLASSES}
    return bool(classes) and all(name in known or name.endswith(SCRIPT_ARGUMENTS) for name in classes)


def _parser_classes(node: ast.AST) -> Iterator[str]:
    """Yield the names of the classes in a call of a parser; an empty string for another expression."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _PARSERS:
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            for part in argument.elts if isinstance(argument, ast.Tuple | ast.List) else [argument]:
                yield part.id if isinstance(part, ast.Name) else ""
