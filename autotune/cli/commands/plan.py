"""The command ``autotune plan``: predicts without a GPU which configurations fit and how fast they are."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from autotune.app.arguments import AUTO, PlanArguments, RentArguments, option
from autotune.cli.arguments import add_json, add_options, options_of, trainer_names
from autotune.errors import InputError, UnwrittenError

if TYPE_CHECKING:
    from autotune.core.documents.estimate import Plan

SUMMARY = "predict what fits and how fast it is, with no GPU"
DESCRIPTION = (
    "Runs TRL's own training step on a virtual accelerator, with no GPU and no weights, for any GPU of the catalogue. "
    "Traces about 100 candidates and ranks them. Predictions are not measurements: their errors are stated. "
    "autotune probe measures."
)
_LIST = "list"
_PLAN_OPTIONS, _RENT_OPTIONS = ({each.name for each in fields(kind)} for kind in (PlanArguments, RentArguments))
_FOR_ONE_PLAN = {"html", "all"} | (_PLAN_OPTIONS - _RENT_OPTIONS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: those of ``autotune.plan`` and ``autotune.rent``."""
    add_options(parser, RentArguments, PlanArguments, optional=("model",))
    parser.add_argument("--html", metavar="FILE", help="write a page about the plan, such as plan.html")
    add_json(parser, "the plan with the estimates of the table")
    parser.add_argument("--all", action="store_true", help="with --json: all traced candidates")


def epilog() -> str:
    """Return the end of the help."""
    return (
        "examples:\n"
        "  autotune plan Qwen/Qwen2.5-0.5B --seq-len 2048 --gpu RTX4090\n"
        "  autotune plan ./my-model chats.parquet --gpu 24GiB --allow lora,quantization\n"
        "  autotune plan ./my-model --seq-len 2048 --gpu T4 --fix lora=r16 --fix quantization=4bit-nf4 --json\n"
        "  autotune plan ./my-model data.jsonl --gpu T4 --fix packing=bfd --fix attention=sdpa --explain\n"
        "  autotune plan ./my-model data.jsonl --gpu H100-80GB --html plan.html\n"
        "  autotune plan Qwen/Qwen2.5-7B data.jsonl --gpu all --prices prices.yaml\n"
        "  autotune plan Qwen/Qwen2.5-7B data.jsonl --gpu H100-80GB,A100-80GB --prices prices.yaml\n"
        "  autotune plan ./my-model data.jsonl --gpu H100-80GB --num-processes auto --global-batch-size 64\n"
        "  autotune plan ./my-model data.jsonl --gpu H100-80GB --num-processes 8\n"
        "  autotune plan ./my-model data.jsonl --gpu H100-80GB --num-processes 32 --num-machines 4 --network 3200\n"
        "  autotune plan ./my-model data.jsonl --gpu H100-80GB --output planned\n"
        "  autotune plan --gpu list\n\n"
        f"{trainer_names()}\n"
        "exit codes: 0 something is predicted to fit (and was written to --output),\n"
        "1 nothing is, 2 the input cannot be used\n"
    )


def run(arguments: argparse.Namespace) -> int:
    """Plan, show the estimates, and return the exit code: 1 if nothing is predicted to fit."""
    from autotune.inspection.gpus import compares_gpus

    options, as_json = options_of(arguments)
    if "all" in options and not as_json:
        raise InputError("--all is for --json.", hint="Give both, or --top N for a longer table.")
    if options.get("gpu") == _LIST:
        return _list(as_json=as_json)
    if options.get("model") is None:
        raise InputError("autotune plan needs a MODEL.", hint="See autotune plan --help.")

    if compares_gpus(options.get("gpu")) or options.get("num_processes") == AUTO:
        for name in (name for name in options if name in _FOR_ONE_PLAN):
            raise InputError(
                f"{option(name)} is for one plan, not for a table.",
                hint="Leave it out, or name the GPU and the number of processes.",
            )
        return _compare(options, as_json=as_json)
    return _plan(options, options.pop("html", None), as_json=as_json, whole=options.pop("all", False))


def _list(*, as_json: bool) -> int:
    """Show the known GPUs, and return the exit code."""
    from autotune.cli.console import stdout_console, write_result
    from autotune.inspection.gpus import gpus
    from autotune.reporting.catalogues import gpus_report

    width = stdout_console().width
    write_result(gpus(), lambda known: gpus_report(known, width), as_json=as_json)
    return 0


def _plan(options: dict[str, Any], page: str | None, *, as_json: bool, whole: bool) -> int:
    """Plan for one GPU, show the estimates, and return the exit code."""
    from autotune.app.plan import plan
    from autotune.cli.console import stderr_console, write_result
    from autotune.emit.files import check_file
    from autotune.inspection.paths import user_path
    from autotune.reporting.plan import plan_report
    from autotune.reporting.watch import watching

    if page is not None:
        check_file(user_path(page), "--html")
    result: Plan
    with watching(stderr_console()) as listener:
        try:
            result, failure = plan(**options, listener=listener), None
        except UnwrittenError as error:
            result, failure = error.document, error
    top = int(options.get("top", PlanArguments.top))
    document = result.summary(top) if as_json and not whole else result
    write_result(document, lambda plan: plan_report(plan, top), as_json=as_json)
    if page is not None:
        _print_message(_write_page(result, page))
    if failure is not None:
        raise failure
    if "output" not in options:
        return 0 if result.fastest is not None else 1
    where = f"wrote {result.bundle.directory}, planned and not measured" if result.bundle is not None else ""
    _print_message(where or f"Nothing was written: {result.unwritten}.")
    return 0 if result.bundle is not None else 1


def _write_page(plan: Plan, page: str) -> str:
    """Write the page, and return a message about it; the plan is valid without the page."""
    from autotune.app.report import report

    try:
        return f"wrote {report(plan, output=page)}"
    except InputError as error:
        return f"There is no page: {error}"


def _print_message(text: str) -> None:
    from autotune.cli.console import stderr_console

    stderr_console().print(text, soft_wrap=True, markup=False, highlight=False)


def _compare(options: dict[str, Any], *, as_json: bool) -> int:
    """Compare GPUs, show the table, and return the exit code: 1 if nothing is predicted to fit on any."""
    from autotune.app.rent import rent
    from autotune.cli.console import stderr_console, write_result
    from autotune.reporting.rent import rent_report
    from autotune.reporting.watch import watching

    # Without --gpu, numbers of this machine's GPU are compared.
    options.setdefault("gpu", None)
    with watching(stderr_console()) as listener:
        result = rent(**options, listener=listener)
    write_result(result, rent_report, as_json=as_json)
    return 0 if any(offer.fits for offer in result.offers) else 1
