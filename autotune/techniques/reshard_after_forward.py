"""``reshard_after_forward``: whether FSDP2 frees the gathered weights of a layer between forward and backward."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import OFF, ON, Distributed, Option
from autotune.techniques.sharding import FSDP2
from autotune.techniques.trace_impact import TraceImpact


class ReshardAfterForward(Distributed):
    """The key of that name in ``fsdp_config``."""

    summary = "Frees FSDP2's gathered weights of a layer after its forward pass, and gathers them again for backward."
    options = (
        Option(ON, "weights of one layer at a time"),
        Option(OFF, "all weights stay gathered from forward to backward: less communication"),
    )
    needs = f"sharding={FSDP2}"
    writes = frozenset({"args.fsdp_config.reshard_after_forward"})
    impact = TraceImpact(frees_weights=lambda choice: choice == ON)

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Return ``on`` without FSDP2."""
        return choice if candidate.get("sharding") == FSDP2 else ON

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        if candidate.get("sharding") != FSDP2:
            return {}
        return {"args.fsdp_config.reshard_after_forward": choice == ON}
