"""``packing``: several documents in one row, instead of padding."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import Effect, Option, Technique

NONE = "none"
SEPARATING = frozenset({"bfd", "bfd_split"})
"""Strategies whose documents must not see one another; TRL makes them padding-free."""


def not_separated(candidate: Candidate, setting: Setting) -> str | None:
    """Return why documents that share a row would see one another in this candidate, or None when they do not."""
    attention = str(candidate["attention"])
    check = setting.workload.packing_checks.get(attention)
    model = setting.workload.model.model_type
    if check is None:
        return f"packed documents were not checked to stay apart with attention={attention} on {model}"
    if not check.separates:
        return f"packed documents do not stay apart with attention={attention} on {model}: {check.reason}"
    return None


def never_separated(setting: Setting) -> str | None:
    """Return why no attention implementation keeps documents apart here, or None when one does."""
    checks = setting.workload.packing_checks
    if any(check.separates for check in checks.values()):
        return None
    model = setting.workload.model.model_type
    tried = "; ".join(f"with {name}: {check.reason}" for name, check in checks.items()) or "no attention was checked"
    return f"documents that share a row do not stay apart on {model} ({tried})"


class Packing(Technique):
    """TRL's packing strategies."""

    name = "packing"
    summary = "Fills rows with several documents, so that no time and memory go into padding."
    options = (
        Option(NONE, "one document per row, padded to the longest of its micro-batch"),
        Option("bfd", "whole documents fitted into rows; what is longer than a row is cut"),
        Option("bfd_split", "as bfd, and what overflows goes on in another row", Effect.CHANGES_TRAINING),
        Option("wrapped", "documents end to end, cut anywhere, and seeing one another", Effect.CHANGES_TRAINING),
    )
    trl_default = NONE
    needs = "an architecture and attention that keep packed documents apart (checked)"
    changes = (
        "bfd_split cuts documents that are longer than a row, and the later part does not see the earlier; "
        "with wrapped, documents attend to their neighbours"
    )
    writes = frozenset({"args.packing", "args.packing_strategy"})
    only_sizes = True
    patches_libraries = False

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Where no document overflows a row there is nothing to split."""
        overflows = setting.workload.dataset.documents.longest > int(candidate["max_length"])
        return "bfd" if choice == "bfd_split" and not overflows else choice

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """See law 4: offered only after the self-test."""
        return never_separated(setting) if choice in SEPARATING else None

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Documents that share a row have to stay apart, except where the strategy says that they do not."""
        return not_separated(candidate, setting) if choice in SEPARATING else None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """A strategy is named only where there is packing, so that plans without it are equal."""
        if choice == NONE:
            return {"args.packing": False}
        return {"args.packing": True, "args.packing_strategy": choice}


TECHNIQUE = Packing()
