"""The command that a page gives to repeat a run: it has every option, and is read as what was given."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from autotune.app.arguments import PlanArguments, ProbeArguments
from autotune.cli.arguments import options_of
from autotune.cli.parser import build_parser, read_arguments
from autotune.inspection.gpus import find_gpu
from autotune.reporting.sections import repeat_command
from autotune.units import GIB, parse_duration, parse_size

COMMANDS: dict[str, type[Any]] = {"probe": ProbeArguments, "plan": PlanArguments}
# What these write is another form of the same result.
OF_THE_OUTPUT = {"help", "json", "all", "html", "debug"}
ROWS = {"model": "a model", "dataset": "rows of mine.jsonl"}


def actions(command: str) -> dict[str, argparse.Action]:
    """Return the options of a command, by the names of the API's parameters."""
    subparsers = next(action for action in build_parser()._actions if action.dest == "==SUPPRESS==" and action.choices)
    assert isinstance(subparsers.choices, dict)
    found = {action.dest: action for action in subparsers.choices[command]._actions}
    return {name: action for name, action in found.items() if name not in (*OF_THE_OUTPUT, *ROWS)}


def words_of(action: argparse.Action) -> list[str]:
    """Return what a user might write of an option."""
    option = action.option_strings[0]
    if action.nargs == 0:
        return [option]
    if action.dest == "fix":
        return [option, "packing=none", option, "max_length=512"]
    if isinstance(action, argparse._AppendAction):
        return [option, "one,two", option, "three"]
    value = list(action.choices)[-1] if action.choices else "0.25" if action.type is float else "7"
    return [option, value if action.choices or action.type else "some 'words' & more"]


def every_option() -> Iterator[Any]:
    for command in COMMANDS:
        for name, action in actions(command).items():
            yield pytest.param(command, words_of(action), id=f"{command} {name}")


def read(words: list[str]) -> dict[str, Any]:
    """Return the arguments of the API that words are."""
    return options_of(read_arguments(words).arguments)[0]


def repeated(command: str, options: dict[str, Any]) -> str:
    """Return the command that repeats a call of the API."""
    return repeat_command(command, COMMANDS[command](**options).settings)


@pytest.mark.parametrize(("command", "words"), list(every_option()))
def test_every_option_that_was_given_is_read_again_as_it_was(command: str, words: list[str]) -> None:
    options = read([command, *ROWS.values(), *words])
    assert len(options) == 3
    _, *again = shlex.split(repeated(command, options))
    assert again != [command, *ROWS.values()]
    assert read(again) == options


def test_what_was_not_given_is_not_repeated() -> None:
    again = repeated("plan", {**ROWS, "allow": (), "fix": {}, "top": 20})
    assert again == "autotune plan 'a model' 'rows of mine.jsonl'"


def test_prices_that_are_no_file_are_not_repeated() -> None:
    assert repeated("plan", {**ROWS, "prices": {"T4": 0.4}}) == "autotune plan 'a model' 'rows of mine.jsonl'"


def test_rows_in_place_of_a_base_s_are_not_repeated_as_its_model() -> None:
    again = repeated("probe", {"base": "mine.yaml", "dataset": "rows.jsonl"})
    assert again == "autotune probe MODEL rows.jsonl --base mine.yaml"


def test_a_value_that_looks_like_an_option_is_still_its_value() -> None:
    options = read(["probe", *ROWS.values(), "--output=-o", "--space=--s.yaml"])
    assert repeated("probe", options).endswith("--space=--s.yaml --output=-o")


def test_numbers_that_a_script_gave_are_written_with_their_units() -> None:
    options = {**ROWS, "timeout": 90.5, "memory_budget": 24 * GIB}
    again = read(shlex.split(repeated("probe", options))[1:])
    assert parse_duration(str(again["timeout"])) == 90.5
    assert parse_size(again["memory_budget"]) == 24 * GIB
    again = read(shlex.split(repeated("plan", {**ROWS, "gpu": 24 * GIB}))[1:])
    assert find_gpu(again["gpu"]).memory_bytes == 24 * GIB


@pytest.mark.parametrize("password", ["secret", "s/e:c", "%40secret"])
def test_a_password_is_not_among_what_was_given(password: str) -> None:
    url = f"postgresql+psycopg://me:{password}@host/name"
    assert make_url(url).password is not None
    again = repeated("probe", {**ROWS, "storage": url})
    assert password not in again
    assert "postgresql+psycopg://me:***@host/name" in again
    for plain in ("sqlite:///a:b@c.db", "journal:///a/b.log", "postgresql://me@host/name", "grpc://host:13000"):
        assert plain in repeated("probe", {**ROWS, "storage": plain})


def test_what_was_given_is_plain_data_whatever_a_script_gave() -> None:
    taken: dict[str, Any] = {
        "base": Path("mine.yaml"),
        "allow": ("lora",),
        "fix": {"packing": "none", "peft_config": Path("mine.json")},
        "listener": print,
    }
    assert ProbeArguments(**taken).settings == {
        "base": "mine.yaml", "allow": ["lora"], "fix": {"packing": "none", "peft_config": "mine.json"},
    }  # fmt: skip
