"""``autotune plan --gpu all`` on the command line: its output, its exit codes, and refused options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from autotune.app.arguments import PlanArguments, RentArguments
from autotune.cli.boundary import run
from autotune.cli.commands.plan import run as run_plan
from autotune.core.documents.rent import Rent
from autotune.core.files.codec import decode
from autotune.errors import InputError
from tests.reporting.rents import TOO_SMALL, a_rent


def plan(*words: object) -> int:
    """Run the command in this process and return its exit code."""
    return run(["autotune", "plan", *map(str, words)])


@pytest.fixture
def asked(api: Callable[..., None]) -> dict[str, Any]:
    """Replace the API's function by one that returns a table; return the arguments of its calls."""
    given: dict[str, Any] = {}

    def found(**options: Any) -> Rent:
        given.update(options)
        given.pop("listener")
        table: Rent = given.pop("table", a_rent())
        return table

    api(rent=found)
    return given


def test_the_options_reach_the_api(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = "M D --gpu all --prices p.yaml --num-processes auto --num-machines 2 --network 400 --allow lora"
    assert plan(*words.split()) == 0
    assert asked == {
        "model": "M", "dataset": "D", "gpu": "all", "prices": "p.yaml", "num_processes": "auto", "num_machines": 2,
        "network": 400.0, "allow": ["lora"],
    }  # fmt: skip
    assert "The cheapest: L40S" in capsys.readouterr().out


def test_auto_is_a_table_for_one_gpu_too(asked: dict[str, Any]) -> None:
    plan("M", "D", "--gpu", "T4", "--num-processes", "auto")
    assert (asked["gpu"], asked["num_processes"]) == ("T4", "auto")
    plan("M", "D", "--num-processes", "auto")
    assert asked["gpu"] is None


@pytest.mark.parametrize("words", ["--gpu T4,H100-80GB", "--gpu T4 --gpu H100-80GB"])
def test_several_names_are_a_table(words: str, asked: dict[str, Any]) -> None:
    assert plan("M", "D", *words.split()) == 0
    assert asked["gpu"] == "T4,H100-80GB"


def test_where_nothing_fits_the_exit_code_is_1(asked: dict[str, Any]) -> None:
    asked["table"] = a_rent(offers=(TOO_SMALL,))
    assert plan("M", "D", "--gpu", "all") == 1


def test_json_is_the_whole_table_and_all_that_is_on_stdout(
    asked: dict[str, Any], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert plan("M", "D", "--gpu", "all", "--json") == 0
    assert decode(Rent, json.loads(capfdbinary.readouterr().out)) == a_rent()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("M D --gpu all --html plan.html", "--html is for one plan, not for a table."),
        ("M D --num-processes auto --html plan.html", "--html is for one plan, not for a table."),
        ("M D --gpu all --explain", "--explain is for one plan"),
        ("M D --gpu all --top 3", "--top is for one plan"),
        ("M D --gpu T4 --num-processes many", "'many' is neither a number nor auto"),
        ("M --seq-len 8 --gpu T4,T5", "'T5' is not a known GPU."),
        ("M --seq-len 8 --gpu ,", "--gpu names no GPU."),
        ("M --gpu all", "A plan needs a DATASET or --seq-len, and has neither."),
        ("M --seq-len 8 --gpu all --prices nowhere.yaml", "nowhere.yaml does not exist"),
        ("M --seq-len 8 --gpu all --num-processes 8 --global-batch-size 12", "Take a multiple of 8."),
        ("M D --gpu T4 --network fast", "invalid float value: 'fast'"),
    ],
)
def test_what_cannot_be_used_is_one_message(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("autotune: ")
    assert len(err.splitlines()) == 1


def test_no_option_of_one_plan_is_passed_on_to_a_table() -> None:
    for name in {each.name for each in fields(PlanArguments)} - {each.name for each in fields(RentArguments)}:
        with pytest.raises(InputError, match="is for one plan, not for a table"):
            run_plan(argparse.Namespace(model="M", gpu="all", **{name: "given"}))


def test_prices_with_an_unknown_gpu_end_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("H1000: 2.99")
    assert plan("nowhere/at/all", "--seq-len", 8, "--gpu", "all", "--prices", file) == 2
    assert "'H1000' is not a known GPU" in capsys.readouterr().err
