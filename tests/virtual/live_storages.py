"""Placeholder."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autotune.virtual.reference import run_on_cpu
from tests.virtual.real_ranks import Measured


def steps_on_cpu(fn: Callable[[torch.device], object]) -> dict[str, Measured]:
    found = run_on_cpu(fn)
    import os,pickle
    if os.environ.get('DUMP'): pickle.dump(found,open(os.environ['DUMP']+'-'+os.environ['RANK']+'.pkl','wb'))
    return {name: Measured(phase.start_bytes, phase.peak_bytes, phase.end_bytes) for name, phase in found.items()}
