"""How a training and vLLM share one GPU, for each share of it that vLLM may take, or several, some for either."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.candidate import Candidate


@dataclass(frozen=True)
class VllmShare:
    """One value of ``vllm_gpu_memory_utilization``.

    Attributes:
        requested_bytes: what vLLM takes.
        cache_bytes: its key-value cache; negative where the rest of vLLM needs more than it takes.
        sequences: of the longest that the cache holds at once; None if the model's cache is not known.
        spare_bytes: what both leave of the budget; negative if they do not fit.
        sleeping_spare_bytes: the same with sleep mode.
        refused: why vLLM does not start, in words; empty if it does.
    """

    utilization: float
    requested_bytes: int
    cache_bytes: int
    sequences: float | None
    spare_bytes: int
    sleeping_spare_bytes: int
    refused: str = ""


@dataclass(frozen=True)
class VllmOutlook:
    """What ``vllm_gpu_memory_utilization`` may be beside one training.

    Attributes:
        candidate: the training, with ``vllm=colocate``.
        fastest: whether it is the fastest that fits without vLLM; else that one leaves vLLM too little.
        training_bytes: device memory that it needs by itself.
        generation_bytes: how much of it is held while completions are generated.
        sequence_tokens: tokens of the longest sequence of vLLM, or None if it has no limit.
        completions: of a generation batch: the most that are generated at once.
        least: the smallest share with which vLLM starts.
        most, most_sleeping: the largest share that leaves training enough, without and with sleep mode; None if no
            share does.
        enough: the smallest share whose cache holds all completions of a generation batch at once, however long.
        shares: these, TRL's default, and some between.
        assumptions: what was assumed, in sentences.
    """

    candidate: Candidate
    fastest: bool
    training_bytes: int
    generation_bytes: int
    sequence_tokens: int | None
    completions: int
    least: VllmShare | None
    most: VllmShare | None
    most_sleeping: VllmShare | None
    enough: VllmShare | None
    shares: tuple[VllmShare, ...]
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class ServerSplit:
    """GPUs of which some generate, in a vLLM server, and the others train.

    Attributes:
        generation: GPUs of the server, which share its weights and its cache by tensor parallelism.
        training: processes that train, each on a GPU of its own.
        reason: why that is not possible, or not known; empty otherwise. The rest is then not known.
        candidate: the training, with ``vllm=server``.
        training_bytes: memory that each of the GPUs that train needs.
        training_spare_bytes: what it leaves of the budget; negative if it does not fit.
        training_error: share of ``training_bytes`` by which it may be off, either way.
        training_seconds: of an optimizer step without the generation, whose time is not known; None without a speed.
        server_bytes: what vLLM takes of each GPU of the server.
        cache_bytes: its key-value cache on each.
        sequences: of the longest that the cache holds at once; None if the model's cache is not known.
        serve, train: the commands of the two sides, in the order in which they are started.
    """

    generation: int
    training: int
    reason: str = ""
    candidate: Candidate | None = None
    training_bytes: int = 0
    training_spare_bytes: int = 0
    training_error: float = 0.0
    training_seconds: float | None = None
    server_bytes: int = 0
    cache_bytes: int = 0
    sequences: float | None = None
    serve: str = ""
    train: str = ""

    @property
    def fits(self) -> bool:
        """Whether both sides are predicted to fit."""
        return not self.reason and self.training_spare_bytes >= 0
