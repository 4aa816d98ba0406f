"""``allocator``: whether the segments of PyTorch's caching allocator can grow."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.plan import ALLOCATOR_VARIABLES, EXPANDABLE_SEGMENTS
from autotune.core.setting import Setting
from autotune.techniques.base import Equipped, Option
from autotune.techniques.trace_impact import Scope, TraceImpact
from autotune.techniques.vllm import NAME as VLLM
from autotune.techniques.vllm import SLEEPING

DEFAULT = "default"


class Allocator(Equipped):
    """``expandable_segments`` in the environment variables that configure PyTorch's caching allocator."""

    name = "allocator"
    summary = "Lets segments of reserved GPU memory grow, so that less of it is unused between tensors."
    options = (
        Option(DEFAULT, "segments of fixed sizes; blocks that were freed serve requests that fit into them"),
        Option("expandable_segments", "segments grow page by page, so that hardly any memory is fragmented"),
    )
    trl_default = DEFAULT
    # Its allocator has no segments.
    without_gpu = "it is a setting of the allocator of GPU memory, and there is no GPU"
    needs = "a CUDA GPU"
    writes = frozenset(f"env.{name}" for name in ALLOCATOR_VARIABLES)
    impact = TraceImpact(Scope.ALLOCATOR)

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason with vLLM's sleep mode, which refuses it (``vllm/device_allocator/cumem.py``)."""
        if choice != DEFAULT and candidate.get(VLLM) == SLEEPING:
            return "vLLM's sleep mode has a memory pool of its own, which does not work with expandable segments"
        return None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """Return no entry for the default: a probe runs without the variables of the user's environment."""
        return {} if choice == DEFAULT else dict.fromkeys(self.writes, EXPANDABLE_SEGMENTS)
