"""The settings of a document: the arguments that differ from their defaults, as plain data without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from autotune.app.arguments import ProbeArguments


@pytest.mark.parametrize("password", ["secret", "s/e:c", "%40secret"])
def test_a_password_is_not_among_what_was_given(password: str) -> None:
    url = f"postgresql+psycopg://me:{password}@host/name"
    assert make_url(url).password is not None
    assert ProbeArguments(storage=url).settings == {"storage": "postgresql+psycopg://me:***@host/name"}
    for plain in ("sqlite:///a:b@c.db", "journal:///a/b.log", "postgresql://me@host/name", "grpc://host:13000"):
        assert ProbeArguments(storage=plain).settings == {"storage": plain}


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
