"""The jobs of :mod:`tests.virtual.alone` on a server that has done before what each of its processes would do first.

The processes of all tests together would do it some thousand times.
"""

from __future__ import annotations

import accelerate.commands.launch  # noqa: F401 for the processes of jobs
import trl.cli  # noqa: F401 for the processes of jobs

from autotune.virtual.operators.accumulation import counts_alone
from tests.virtual import alone

JOBS = alone.JOBS

# A backward pass: without a GPU, PyTorch starts no threads for it, which would not be in the processes of jobs.
counts_alone()
