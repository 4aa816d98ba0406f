"""Tables of GPUs made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotune.core.candidate import Candidate
from autotune.core.documents.rent import Offer, Rent
from autotune.inspection.gpus import find_gpu
from autotune.units import GIB
from tests.reporting.plans import LONGEST, an_estimate


def an_offer(name: str, rate: float, price: float | None, processes: int = 1, **changes: Any) -> Offer:
    """An offer of a GPU for an epoch of 3.6e9 tokens."""
    seconds = 3.6e9 / rate
    offer = Offer(
        gpu=find_gpu(name),
        processes=processes,
        estimate=an_estimate(LONGEST, 20 * GIB, rate),
        differences=Candidate({"packing": "bfd", "lora": "r16"}),
        tokens_per_second=rate,
        seconds=seconds,
        price=price,
        cost=price * processes * seconds / 3600 if price is not None else None,
    )
    return replace(offer, **changes)


CHEAPEST = an_offer("L40S", 10_000.0, 0.8)
FASTEST = an_offer("H200", 120_000.0, 4.0, processes=4)
UNPRICED = an_offer("B200", 60_000.0, None)
TOO_SMALL = Offer(find_gpu("T4"), 1, reason="the least needs 20.00 GiB of 14.56 GiB")


def a_rent(**changes: Any) -> Rent:
    """A table in which one GPU is the cheapest, another the fastest, one has no price, and one is too small."""
    rent = Rent(
        model="Qwen/Qwen2.5-7B",
        dataset="chats",
        trainer="sft",
        unit="epoch",
        global_batch_size=8,
        num_processes="auto",
        num_machines=1,
        priced=True,
        offers=(CHEAPEST, FASTEST, UNPRICED, TOO_SMALL),
        notes=("Nothing was measured.",),
        trace_count=12,
        new_trace_count=10,
        wall_seconds=33.0,
        settings={"fix": {"liger": "off"}},
    )
    return replace(rent, **changes)
