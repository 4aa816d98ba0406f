"""Fields that techniques write and the installed TRL does not have are found before anything is planned with them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from autotune.step.jobs.prepare import absent_entries
from autotune.step.trainers import adapter, adapters


@pytest.mark.parametrize("name", adapters())
def test_the_installed_trl_has_every_field(name: str) -> None:
    assert absent_entries(adapter(name)) == ()


def test_a_field_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Later:
        """A configuration of a later TRL, with a single field."""

        packing: bool = False

    known = adapter("sft")
    monkeypatch.setattr(type(known), "config", Later)
    found = absent_entries(known)
    assert "args.packing" not in found
    assert {"args.max_length", "args.use_liger_kernel", "args.model_init_kwargs.use_kernels"} <= set(found)
    assert not any(entry.startswith(("model.", "env.", "peft")) for entry in found)
