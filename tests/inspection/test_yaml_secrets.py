"""A configuration can be shown and worked with without the values of its secret keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from autotune.confidential import SHOWN
from autotune.inspection.yaml_file import YamlFile, parsed
from autotune.inspection.yaml_secrets import withheld

SECRET = "planted0secret"


def without(text: str) -> YamlFile:
    """Return a configuration as it is withheld, which has as many lines as before."""
    found = withheld(parsed(text, Path("c.yaml")))
    assert SECRET not in found.text
    assert SECRET not in repr(found.values)
    assert found.text.count("\n") == text.count("\n")
    assert yaml.safe_load(found.text) == found.values
    return found


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (f"hub_token: {SECRET}  # mine\nseed: 1\n", {"hub_token": SHOWN, "seed": 1}),
        (f"hub_token: '{SECRET}'\r\nseed: 1\r\n", {"hub_token": SHOWN, "seed": 1}),
        (f"env: {{HF_TOKEN: {SECRET}, A: b}}\n", {"env": {"HF_TOKEN": SHOWN, "A": "b"}}),
        (f"env:\n  HF_TOKEN: {SECRET}\n  A: b\n", {"env": {"HF_TOKEN": SHOWN, "A": "b"}}),
        (f"hub_token: |\n  {SECRET}\n  more\n\nseed: 1\n", {"hub_token": SHOWN, "seed": 1}),
        (f"hub_token:\n  {SECRET}\n  more\nseed: 1", {"hub_token": SHOWN, "seed": 1}),
        (f"hub_token: &t {SECRET}\nenv: {{HF_TOKEN: *t}}\n", {"hub_token": SHOWN, "env": {"HF_TOKEN": SHOWN}}),
        (f"run_name: &t {SECRET}\nhub_token: *t\n", {"run_name": SHOWN, "hub_token": SHOWN}),
        (f"hub_token: !!str {SECRET}\n", {"hub_token": SHOWN}),
        ("password: 12345678\n", {"password": SHOWN}),
        (f"credentials:\n  - {SECRET}\n  - {{a: {SECRET}}}\n", {"credentials": [SHOWN, {"a": SHOWN}]}),
        (f"datasets: [{{data_files: 'https://me:{SECRET}@h/r'}}]\n", {"datasets": [{"data_files": "https://***@h/r"}]}),
        (f"data: https://h/r?a=1&token={SECRET}\n", {"data": "https://h/r?a=1&token=***"}),
        (f"kwargs: '{{\"token\": \"{SECRET}\"}}'\n", {"kwargs": '{"token": "***"}'}),
        (f"# hub_token: {SECRET}\nseed: 1  # token={SECRET}\n", {"seed": 1}),
        (f"hub_token: {SECRET}\nseed: 1\n# as {SECRET} is old", {"hub_token": SHOWN, "seed": 1}),
        (f"a: &e\n  HF_TOKEN: {SECRET}\nb:\n  <<: *e\n", {"a": {"HF_TOKEN": SHOWN}, "b": {"HF_TOKEN": SHOWN}}),
    ],
)  # fmt: skip
def test_what_is_secret_is_not_there(text: str, values: object) -> None:
    assert without(text).values == values


def test_what_is_not_secret_stays_as_it_is() -> None:
    text = "eos_token: </s>  # the token\nhub_token: null\npush_to_hub: true\nenv: {WANDB_PROJECT: a}\nhub_token_: ''\n"
    file = parsed(text, Path("c.yaml"))
    assert withheld(file) is file
