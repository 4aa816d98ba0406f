"""Which installed versions a technique takes for new enough."""

from __future__ import annotations

import pytest

from autotune.core.machine import Hardware, Machine
from autotune.techniques.versions import installed


@pytest.mark.parametrize(
    ("version", "range_", "inside"),
    [
        ("5.23.0", ">=5.23", True),
        ("5.23", ">=5.23.0", True),
        ("5.22.3", ">=5.23", False),
        ("5.100.0", ">=5.23", True),
        # A build from before the release need not have what the release has.
        ("5.23.0.dev0", ">=5.23", False),
        ("5.23.0rc1", ">=5.23", False),
        ("5.24.0.dev0", ">=5.23", True),
        # A build label says nothing of the order.
        ("2.13.0+cpu", ">=2.13", True),
        ("2.12.1+cu130", ">=2.13", False),
        ("2.8.3.post1", ">=2.8.3", True),
        ("0.18.2", ">=0.18.2,<0.19", True),
        ("0.19.0", ">=0.18.2,<0.19", False),
        ("0.19.0.dev0", ">=0.18.2,<0.19", False),
        ("a build of ours", ">=0", False),
    ],
)
def test_a_version_lies_in_a_range(version: str, range_: str, inside: bool) -> None:
    machine = Machine(Hardware("cpu", "a CPU", 1), {"package": version})
    assert installed(machine, "package", range_) is inside


def test_what_is_not_installed_lies_in_no_range() -> None:
    assert not installed(Machine(Hardware("cpu", "a CPU", 1)), "package", ">=0")
