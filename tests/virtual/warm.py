"""The jobs of :mod:`tests.virtual.alone` on a server that has done before what each of its processes would do first.

The processes of all tests together would do it some thousand times.
"""

from __future__ import annotations

import accelerate.commands.launch  # noqa: F401 for the processes of jobs
import torch
import transformers.models.llama.modeling_llama  # noqa: F401 for the processes of jobs
import trl.cli  # noqa: F401 for the processes of jobs

from autotune.virtual.operators.accumulation import counts_alone
from tests.virtual import alone

JOBS = alone.JOBS

# PyTorch's CUDA build starts threads for the first backward pass, which would not be in the processes of jobs.
if not torch.backends.cuda.is_built():
    counts_alone()
