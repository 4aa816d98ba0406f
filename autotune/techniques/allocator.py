"""``allocator``: whether the segments of PyTorch's caching allocator can grow."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.plan import ALLOCATOR_VARIABLES, EXPANDABLE_SEGMENTS
from autotune.core.setting import Setting
from autotune.techniques.base import Equipped, Option
from autotune.techniques.trace_impact import Scope, TraceImpact
from autotune.techniques.vllm import is_colocated
from autotune.techniques.vllm_tensor_parallel_size import VllmTensorParallelSize

DEFAULT = "default"


class Allocator(Equipped):
    """``expandable_segments`` in the environment variables that configure PyTorch's caching allocator."""

    summary = "Configures PyTorch's caching allocator; segments that can grow reduce fragmentation."
    options = (
        Option(DEFAULT, "segments of fixed sizes; a freed block is reused for requests that fit into it"),
        Option("expandable_segments", "segments grow page by page, with hardly any fragmentation"),
    )
    # A CPU's allocator has no segments.
    without_gpu = "it is a setting of the allocator of GPU memory, and there is no GPU"
    needs = "a CUDA GPU, and no vLLM engine on several GPUs"
    writes = frozenset(f"env.{name}" for name in ALLOCATOR_VARIABLES)
    impact = TraceImpact(Scope.ALLOCATOR)

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if several GPUs share a vLLM engine inside the training's processes.

        vLLM's all-reduce exports buffers to other GPUs by handles that growing segments lack
        (``csrc/custom_all_reduce.cuh``), and ends the process (https://github.com/vllm-project/vllm/issues/42609).
        Sleep mode needs no rule: vLLM disables growing segments for its own pool (``CuMemAllocator.use_memory_pool``).
        """
        gpus = int(candidate.get(VllmTensorParallelSize.name, 1)) if is_colocated(candidate) else 1
        if choice == DEFAULT or gpus == 1:
            return None
        return f"the all-reduce of vLLM among {gpus} GPUs cannot share segments that grow, and may end the process"

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """Return no entry for the default: a probe runs without the variables of the user's environment."""
        return {} if choice == DEFAULT else dict.fromkeys(self.writes, EXPANDABLE_SEGMENTS)
