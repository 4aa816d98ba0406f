"""The command ``autotune check``: checks before a job starts whether its configuration runs and fits."""

from __future__ import annotations

import argparse
from typing import Any

from autotune.app.arguments import CheckArguments, option
from autotune.cli.arguments import add_json, add_options, trainer_names
from autotune.errors import InputError

SUMMARY = "check before a job starts whether its configuration runs and fits"
DESCRIPTION = (
    "Reads a configuration with TRL's own parser, reports all errors and silent changes, and checks whether its worst "
    "micro-batch fits the device: by a trace that needs no GPU, or with --probe by a real run."
)
_FILES = (".yaml", ".yml")
# Exit codes, the gravest last.
_BY_SEVERITY = (0, 3, 1, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: those of ``autotune.check``, and of rewriting a file."""
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="*", help="TRL configurations; or -- and a command")
    add_options(parser, CheckArguments)
    parser.add_argument("--fix-legacy", action="store_true", help="rewrite the file with the keys of this TRL release")
    parser.add_argument("--output", metavar="FILE", help="where --fix-legacy writes (default: the file itself)")
    add_json(parser, "the verdict")


def epilog() -> str:
    """Return the end of the help."""
    return (
        "examples:\n"
        "  autotune check config.yaml --gpu H100-80GB\n"
        "  autotune check config.yaml --probe && trl dpo --config config.yaml\n"
        "  autotune check --gpu A100-80GB -- trl dpo --config config.yaml --max_length 4096\n"
        "  autotune check configs/*.yaml --no-fit\n"
        "  autotune check old.yaml --trainer dpo --fix-legacy --output new.yaml\n\n"
        f"{trainer_names()}\n"
        "exit codes: 0 fits, 1 will not fit, 2 cannot run or be read, 3 too close to call\n"
        "or not known; of --fix-legacy: 0 no removed key is left, 1 some are to be replaced by hand\n"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check, and return the exit code."""
    options = dict(vars(arguments))
    words = options.pop("config", [])
    if not words:
        raise InputError("There is nothing to check.", hint="Give CONFIG.yaml, or -- and a command.")
    if options.pop("fix_legacy", False):
        return _fix(words, options)
    if "output" in options:
        raise InputError("--output names the file that --fix-legacy writes.", hint="Give both, or neither.")
    as_json = options.pop("json", False)

    from autotune.app.check.check import check_each
    from autotune.cli.console import stderr_console, stdout_console, write_json
    from autotune.core.documents.verdict import Verdicts
    from autotune.reporting.check import verdict_report
    from autotune.reporting.terminal import show
    from autotune.reporting.watch import watching

    several = len(words) > 1 and all(word.endswith(_FILES) for word in words)
    configurations = words if several or len(words) == 1 else [words]
    with watching(stderr_console()) as listener:
        args = [CheckArguments(each, **options, listener=listener) for each in configurations]
        verdicts = list(check_each(args))
    if as_json:
        write_json(Verdicts(tuple(verdicts)) if several else verdicts[0])
    else:
        for number, (word, each) in enumerate(zip(words, verdicts, strict=False)):
            show(verdict_report(each, word if several else ""), stdout_console(), apart=number > 0)
    return max(verdicts, key=lambda each: _BY_SEVERITY.index(each.exit_code)).exit_code


def _fix(words: list[str], options: dict[str, Any]) -> int:
    from autotune.app.check.fix import fix_legacy
    from autotune.cli.console import stdout_console
    from autotune.reporting.check import fixed_report
    from autotune.reporting.terminal import show

    taken = {name: options.pop(name, None) for name in ("trainer", "output")}
    if len(words) > 1:
        raise InputError("--fix-legacy takes one file.", hint="Fix one after another.")
    if options:
        raise InputError(f"--fix-legacy takes no {option(min(options))}.", hint="Fix the file first, then check it.")
    fixed = fix_legacy(words[0], **taken)
    show(fixed_report(fixed), stdout_console())
    return 0 if fixed.is_done else 1
