"""The environment of the processes that a search starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from autotune.probing.channel import environment_of

STATE = (
    "import accelerate; state = accelerate.PartialState(cpu=True); print(state.num_processes, state.use_distributed)"
)
MPI = [
    {"PMI_SIZE": "2", "PMI_RANK": "0"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
    {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0", "MPI_LOCALRANKID": "0"},
]


@pytest.mark.parametrize("launched", MPI, ids=lambda launched: next(iter(launched)))
def test_a_process_that_mpi_started_starts_processes_that_are_no_ranks(
    launched: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert not any(name in environment_of({}) for name in launched)


@pytest.mark.slow
def test_accelerate_takes_such_a_process_for_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for launched in MPI:
        for name, value in launched.items():
            monkeypatch.setenv(name, value)
    alone, rank = (
        subprocess.run([sys.executable, "-c", STATE], capture_output=True, text=True, check=False, env=environment)
        for environment in (environment_of({}), dict(os.environ))
    )
    assert alone.stdout.split() == ["1", "False"]
    assert rank.returncode != 0
    assert "MASTER_ADDR" in rank.stderr
