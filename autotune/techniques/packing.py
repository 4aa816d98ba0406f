"""``packing``: several documents in one row, instead of padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from autotune.core.candidate import Candidate, Choice
from autotune.core.documents import Documents
from autotune.core.setting import Setting
from autotune.techniques.base import Effect, Option, Technique
from autotune.techniques.trace_impact import SIZES

NONE = "none"
CUTTING = "bfd"
"""The strategy that drops a row's overflow."""
SPLIT = "bfd_split"
WRAPPED = "wrapped"
SEPARATING = frozenset({CUTTING, SPLIT})
"""Strategies whose documents must not attend to each other; TRL makes them padding-free."""
# Batch size of datasets.Dataset.map, which pack_dataset leaves at its default.
_PACKED_AT_ONCE = 1000


def not_separated(candidate: Candidate, setting: Setting) -> str | None:
    """Return why documents in one row would attend to each other in this candidate, or None if they do not."""
    attention = str(candidate["attention"])
    check = setting.workload.packing_checks.get(attention)
    model = setting.workload.model.model_type
    if check is None:
        return f"packed documents were not checked to stay apart with attention={attention} on {model}"
    if not check.separates:
        return f"packed documents do not stay apart with attention={attention} on {model}: {check.reason}"
    return None


def never_separated(setting: Setting) -> str | None:
    """Return why no attention implementation separates documents here, or None if one does."""
    checks = setting.workload.packing_checks
    if any(check.separates for check in checks.values()):
        return None
    model = setting.workload.model.model_type
    tried = "; ".join(f"with {name}: {check.reason}" for name, check in checks.items()) or "no attention was checked"
    return f"documents that share a row do not stay apart on {model} ({tried})"


@lru_cache(4096)
def packed_rows(documents: Documents, strategy: str, length: int) -> int:
    """Return how many rows of ``length`` tokens TRL packs documents into.

    ``trl.pack_dataset`` packs documents in the batches of ``datasets.Dataset.map``, in the order of the dataset. Each
    batch is assumed to contain documents of all lengths, as in a shuffled dataset.
    """
    whole, rest = divmod(documents.rows, _PACKED_AT_ONCE)
    rows = whole * _packed_at_once(documents, strategy, length, _PACKED_AT_ONCE) if whole else 0
    return max(1, rows + (_packed_at_once(documents, strategy, length, rest) if rest else 0))


def documents_per_row(documents: Documents, strategy: str, length: int) -> float:
    """Return how many documents a packed row of ``length`` tokens holds on average."""
    return documents.rows / packed_rows(documents, strategy, length)


def _packed_at_once(documents: Documents, strategy: str, length: int, count: int) -> int:
    """Return the number of rows that ``count`` documents, spread evenly over all lengths, are packed into."""
    chosen: Counter[int] = Counter()
    seen = taken = 0
    for tokens, many in documents.widths.items():
        seen += many
        upto = round(seen * count / documents.rows)
        chosen[tokens] = upto - taken
        taken = upto
    if strategy == WRAPPED:
        return -(-sum(tokens * many for tokens, many in chosen.items()) // length)
    pieces: Counter[int] = Counter()
    for tokens, many in chosen.items():
        whole, rest = divmod(tokens, length)
        if tokens <= length:
            pieces[tokens] += many
        elif strategy == SPLIT:
            pieces[length] += many * whole
            pieces[rest] += many
        else:
            pieces[length] += many
    return _best_fit({tokens: many for tokens, many in pieces.items() if tokens and many}, length)


def _best_fit(counts: Mapping[int, int], length: int) -> int:
    """Return how many rows of ``length`` tokens hold all documents: the longest first, each where it fits best.

    This is the algorithm of TRL's ``bfd`` strategies (``trl/data_utils.py``, ``_pack_bfd``). Documents of equal length
    are packed together, and rows are counted by the space that is left in them.

    Example: documents of 6, 5, 4 and 3 tokens take two rows of 10: 6 and 4, 5 and 3.

    Args:
        counts: number of documents by their tokens, none of which is above ``length``.
    """
    open_rows: dict[int, int] = {}
    rows = 0
    for tokens in sorted(counts, reverse=True):
        left = counts[tokens]
        while left:
            space = min((space for space in open_rows if space >= tokens), default=None)
            if space is None:
                per_row = length // tokens
                whole, rest = divmod(left, per_row)
                rows += whole + (rest > 0)
                open_rows[length - per_row * tokens] = open_rows.get(length - per_row * tokens, 0) + whole
                if rest:
                    open_rows[length - rest * tokens] = open_rows.get(length - rest * tokens, 0) + 1
                left = 0
            else:
                taken = min(left, open_rows[space])
                left, open_rows[space] = left - taken, open_rows[space] - taken
                open_rows[space - tokens] = open_rows.get(space - tokens, 0) + taken
            open_rows = {room: count for room, count in open_rows.items() if room and count}
    return rows


class Packing(Technique):
    """TRL's packing strategies."""

    name = "packing"
    summary = "Fills rows with several documents, so that no time and memory go into padding."
    options = (
        Option(NONE, "one document per row, padded to the longest of its micro-batch"),
        Option(CUTTING, "whole documents fitted into rows; what is longer than a row is cut"),
        Option(SPLIT, "as bfd, and what overflows goes on in another row", Effect.CHANGES_TRAINING),
        Option(WRAPPED, "documents end to end, cut anywhere, and seeing one another", Effect.CHANGES_TRAINING),
    )
    trl_default = NONE
    needs = "an architecture and attention that keep packed documents apart (checked)"
    changes = (
        "bfd_split cuts documents that are longer than a row, and the later part does not see the earlier; "
        "with wrapped, documents attend to their neighbours"
    )
    writes = frozenset({"args.packing", "args.packing_strategy"})
    impact = SIZES

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Merge the splitting strategy with the cutting one where no document overflows a row."""
        overflows = setting.workload.dataset.documents.longest > int(candidate["max_length"])
        return CUTTING if choice == SPLIT and not overflows else choice

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason for rows with images, and unless the self-test passed (law 4)."""
        if choice != NONE and setting.workload.has_images:
            return "TRL refuses it for rows with images"
        return never_separated(setting) if choice in SEPARATING else None

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason where a strategy that separates documents is combined with attention that does not."""
        return not_separated(candidate, setting) if choice in SEPARATING else None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """Return the entries, with a strategy only if packing is on, so that plans without packing are equal."""
        if choice == NONE:
            return {"args.packing": False}
        return {"args.packing": True, "args.packing_strategy": choice}
