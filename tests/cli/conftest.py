"""Fixtures of the command line that replace the API which it calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the API's functions, which need torch and minutes."""

    def put(**functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            module = ModuleType(f"autotune.{'api' if name == 'probe' else 'app'}.{name}")
            vars(module)[name] = function
            monkeypatch.setitem(sys.modules, module.__name__, module)

    return put
