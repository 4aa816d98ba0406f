"""PyTorch's database of operators and optimizers: traces allocate as much as PyTorch's CUDA allocator."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests.nullgpu.machine import NEEDS_CUDA_BUILD, NullMachine, ended
from tests.virtual.operator_differences import DIFFERENT_ON_CUDA, REFUSED_ON_CUDA, differing

pytestmark = [
    *NEEDS_CUDA_BUILD,
    pytest.mark.skipif(not version("torch").startswith("2.13."), reason="what differs is that of PyTorch 2.13"),
]

TRACED = """
    import json
    from tests.virtual.operators import traced
    print(json.dumps(traced("cuda")))
"""
RAN = """
    import json
    from tests.virtual.operators import on_cuda
    print(json.dumps(on_cuda()))
"""


@pytest.mark.nightly
def test_operators_and_optimizers_allocate_in_a_trace_what_they_do_on_a_gpu(machine: NullMachine) -> None:
    variables = machine.environment()
    del variables["NULLGPU_DEVICE"]
    with machine.start(TRACED, variables=variables) as process:
        found = ended(process)
    # Kernels in Python, which compute small tensors, keep autograd from adding gradients in place.
    real = machine.run(RAN, NULLGPU_INTEGERS="0")

    assert len(real) > 400
    assert {name for name, peak in found.items() if isinstance(peak, str)} & real.keys() <= REFUSED_ON_CUDA
    assert differing(found, real).keys() <= DIFFERENT_ON_CUDA
