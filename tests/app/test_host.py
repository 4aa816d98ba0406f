"""The notes on the host's memory."""

from __future__ import annotations

from autotune.app.notes import host_notes
from autotune.core.documents.estimate import MemoryEstimate
from autotune.core.plan import Launch
from autotune.units import GIB

MEMORY = MemoryEstimate(GIB, GIB, 0, {}, 16 * GIB, None, 0.1, machine_bytes=128 * GIB)


def test_the_need_of_a_machine_is_that_of_all_its_processes() -> None:
    (text,) = host_notes(MEMORY, Launch(16, 2), None)
    assert text.startswith("It needs up to 128 GiB of host memory per machine, for the 8 processes on it together:")


def test_it_is_held_against_the_machine_where_that_is_known() -> None:
    (text,) = host_notes(MEMORY, Launch(8), 96 * GIB)
    assert "; this machine has 96.00 GiB: " in text
    assert MEMORY.lacks_host(96 * GIB)
    assert not MEMORY.lacks_host(256 * GIB)
    assert not MEMORY.lacks_host(None)


def test_nothing_is_said_of_one_process_on_a_machine_that_has_enough() -> None:
    assert not list(host_notes(MEMORY, Launch(), 256 * GIB))
    assert list(host_notes(MEMORY, Launch(), 96 * GIB))
