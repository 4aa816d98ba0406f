"""Measurements of several processes become one: the worst for memory, the slowest for time."""

from __future__ import annotations

import socket

import pytest

from autotune.core.jobs.ranks import reserved_port
from autotune.core.machine import Hardware
from autotune.core.measurement import Measurement, combine_ranks
from autotune.core.status import ProbeStatus
from autotune.units import GIB


def shown(peak_bytes: int, step_seconds: float, **more: object) -> Measurement:
    return Measurement(
        ProbeStatus.OK,
        peak_bytes=peak_bytes,
        step_seconds=step_seconds,
        tokens_per_step=100.0,
        tokens_per_second=100.0 / step_seconds,
        documents_per_step=4.0,
        peaks={"micro-batch": peak_bytes},
        **more,  # type: ignore[arg-type]
    )


def test_one_process_is_the_training() -> None:
    alone = shown(5, 1.0)
    assert combine_ranks([alone]) is alone


def test_memory_is_the_worst_rank_s_and_time_the_slowest_s() -> None:
    found = combine_ranks([shown(5, 2.0), shown(7, 1.0)])
    assert (found.peak_bytes, found.step_seconds, found.peaks) == (7, 2.0, {"micro-batch": 7})
    assert (found.tokens_per_step, found.documents_per_step) == (200.0, 8.0)
    assert found.tokens_per_second == pytest.approx(100.0)


def test_a_training_ends_as_its_first_rank_that_failed() -> None:
    failed = Measurement(ProbeStatus.OUT_OF_MEMORY, "in backward")
    assert combine_ranks([shown(5, 1.0), failed, shown(6, 1.0)]) is failed


def test_figures_that_no_rank_has_stay_unknown() -> None:
    assert combine_ranks([shown(5, 1.0), shown(6, 1.0)]).reserved_bytes is None


def test_the_processes_of_a_machine_share_its_cores() -> None:
    assert Hardware("cuda", "H100", GIB, processes=8, machines=2, cores=32).threads == 8


def test_a_group_s_port_goes_to_nothing_but_what_listens_on_it_by_its_number() -> None:
    with reserved_port() as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        socket.create_server(("", port)).close()
