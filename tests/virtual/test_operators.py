"""PyTorch's database of operators and optimizers: traces allocate as much as PyTorch's CPU allocator."""

from __future__ import annotations

import pytest
import torch

from autotune.probing import JobServer
from tests.virtual.alone import apart
from tests.virtual.operator_differences import DIFFERENT_ON_CPU, REFUSED, differing
from tests.virtual.operators import both_on_cpu

pytestmark = pytest.mark.skipif(
    not (2, 13) <= torch.__version__ < (2, 14), reason="the database and what differs are those of PyTorch 2.13"
)


@pytest.mark.nightly
def test_operators_and_optimizers_allocate_in_a_trace_what_they_do_on_the_cpu(job_server: JobServer) -> None:
    found, real = apart(job_server, both_on_cpu)

    assert len(real) > 400
    assert {name for name, peak in found.items() if isinstance(peak, str)} & real.keys() <= REFUSED
    assert differing(found, real).keys() <= DIFFERENT_ON_CPU
