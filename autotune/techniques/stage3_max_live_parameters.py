"""``stage3_max_live_parameters``: how many gathered parameters ZeRO-3 holds at once and keeps for reuse."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import POSITIVE, Distributed, Option
from autotune.techniques.sharding import LIVE_PARAMETERS
from autotune.techniques.trace_impact import TraceImpact

_LIVE = "args.deepspeed.zero_optimization.stage3_max_live_parameters"
_REUSE = "args.deepspeed.zero_optimization.stage3_max_reuse_distance"


class MaxLiveParameters(Distributed):
    """DeepSpeed's ``stage3_max_live_parameters`` and ``stage3_max_reuse_distance``, set to the same number.

    With DeepSpeed's default of 1e9, ZeRO-3 holds all parameters of a smaller model from the second step on.
    """

    summary = "Number of gathered parameters that ZeRO-3 keeps; fewer means more communication."
    options = (Option(LIVE_PARAMETERS, "DeepSpeed's default; any smaller number needs less memory", family=POSITIVE),)
    needs = "sharding=zero3"
    writes = frozenset({_LIVE, _REUSE})
    # Fewer parameters stay gathered than by default.
    impact = TraceImpact(monotonic=True, frees_weights=lambda choice: choice != LIVE_PARAMETERS)

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Return the default without ZeRO-3, or if the model has no more parameters than the limit."""
        enough = int(choice) >= setting.workload.model.parameters
        return LIVE_PARAMETERS if candidate.get("sharding") != "zero3" or enough else choice

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        if candidate.get("sharding") != "zero3" or choice == LIVE_PARAMETERS:
            return {}
        return {_LIVE: int(choice), _REUSE: int(choice)}
