"""``packing``: several documents in one row, instead of padding."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from autotune.core.candidate import Candidate, Choice
from autotune.core.rows.documents import Documents
from autotune.core.setting import Setting
from autotune.techniques.base import Effect, Equipped, Option
from autotune.techniques.trace_impact import SIZES

if TYPE_CHECKING:
    from autotune.core.rows.table import Numbers

NAME = "packing"
NONE = "none"
CUTTING = "bfd"
"""The strategy that drops the overflow of a long document."""
SPLIT = "bfd_split"
WRAPPED = "wrapped"
SEPARATING = frozenset({CUTTING, SPLIT})
"""Strategies whose documents must not attend to each other; TRL makes them padding-free."""
SHUFFLED = "shuffle_dataset"
"""The field with which TRL shuffles rows before it packs them (``_prepare_dataset``)."""
EVALUATION_PACKED = "args.eval_packing"
"""The entry of a user's configuration that packs evaluation rows, independently of training rows."""
PACKED_AT_ONCE = 1000
"""Batch size of ``datasets.Dataset.map``, which ``trl.pack_dataset`` leaves at its default."""


def not_separated(candidate: Candidate, setting: Setting) -> str | None:
    """Return why documents in one row may attend to each other in this candidate, or None if they do not."""
    attention = str(candidate["attention"])
    check = setting.workload.packing_checks.get(attention)
    model = setting.workload.model.model_type
    if check is None:
        return f"whether packed documents attend to each other with attention={attention} on {model} was not checked"
    if not check.separates:
        return f"packed documents attend to each other with attention={attention} on {model}: {check.reason}"
    return None


def never_separated(setting: Setting) -> str | None:
    """Return why no attention implementation separates documents here, or None if one does."""
    checks = setting.workload.packing_checks
    if any(check.separates for check in checks.values()):
        return None
    model = setting.workload.model.model_type
    tried = "; ".join(f"with {name}: {check.reason}" for name, check in checks.items()) or "no attention was checked"
    return f"documents that share a row attend to each other on {model} ({tried})"


@dataclass(frozen=True)
class PackedRows:
    """Documents that are packed into rows.

    Attributes:
        rows: how many rows.
        loss_tokens: tokens in the loss of each row, for one batch that is packed at once, in descending order.
    """

    rows: int
    loss_tokens: Sequence[float]


@lru_cache(4096)
def packed_documents(documents: Documents, strategy: str, length: int) -> PackedRows:
    """Return the rows of ``length`` tokens into which TRL packs documents of one sequence.

    ``trl.pack_dataset`` packs documents in the batches of ``datasets.Dataset.map``. Each batch is assumed to contain
    documents of all lengths, as in a shuffled dataset (:data:`SHUFFLED`).
    """
    whole, rest = divmod(documents.rows, PACKED_AT_ONCE)
    in_whole = _packed_at_once(documents, strategy, length, PACKED_AT_ONCE) if whole else []
    in_rest = _packed_at_once(documents, strategy, length, rest) if rest else []
    rows = max(1, whole * len(in_whole) + len(in_rest))
    return PackedRows(rows, sorted([*in_whole, *in_rest], reverse=True))


def documents_per_row(documents: Documents, strategy: str, length: int) -> float:
    """Return the mean number of documents in a packed row of ``length`` tokens."""
    return documents.rows / packed_documents(documents, strategy, length).rows


def _packed_at_once(documents: Documents, strategy: str, length: int, count: int) -> list[float]:
    """Return the counted tokens of each packed row of ``count`` documents, sampled evenly over all lengths.

    Of documents that are divided among rows, the last tokens are the counted ones, as answers are. A document that is
    cut keeps a proportional share of its own.
    """
    import numpy as np

    tokens, counted = _sample(documents, count)
    if strategy == WRAPPED:
        order = np.random.default_rng(0).permutation(len(tokens))
        own = counted[order]
        ends, held = tokens[order].cumsum(), own.cumsum()
        places, upto = np.stack([ends - own, ends], axis=1).ravel(), np.stack([held - own, held], axis=1).ravel()
        cuts = np.arange(0, ends[-1] + length, length)
        in_row: list[float] = np.diff(np.interp(cuts, [0, *places], [0, *upto])).tolist()
        return in_row
    sizes = list(zip(tokens.tolist(), counted.tolist(), strict=True))
    if strategy == SPLIT:
        pieces = [
            (end - start, max(0.0, end - max(start, whole - own)))
            for whole, own in sizes
            for start in range(0, whole, length)
            for end in (min(start + length, whole),)
        ]
    else:
        pieces = [(min(whole, length), own * min(whole, length) / whole) for whole, own in sizes if whole]
    return _best_fit(sorted(pieces, reverse=True), length)


@lru_cache(64)
def _sample(documents: Documents, count: int) -> tuple[Numbers, Numbers]:
    """Return the tokens of documents sampled evenly over all lengths, and the number of them in the loss.

    The sample is cached, since it does not depend on the rows' length.
    """
    import numpy as np

    groups = documents.groups.rows()
    counted = groups[:, 2] if documents.trained is None else documents.trained.rows()[:, 0]
    ascending = np.lexsort((counted, groups[:, 2]))
    upto = np.rint(groups[ascending, 0].cumsum() * (count / documents.rows)).astype(int)
    taken = ascending.repeat(np.diff(upto, prepend=0))
    return groups[taken, 2], counted[taken]


def _best_fit(documents: Sequence[tuple[int, float]], length: int) -> list[float]:
    """Return the counted tokens of the rows of ``length`` tokens after best-fit packing of all documents.

    This is the algorithm of TRL's ``bfd`` strategies (``trl/data_utils.py``, ``_pack_bfd``).

    Example: documents of 6, 5, 4 and 3 tokens take two rows of 10: 6 and 4, 5 and 3.

    Args:
        documents: tokens, at most ``length``, and counted tokens of each document; the longest first.
    """
    counted: list[float] = []
    # Free space of each row, ascending, and the row's index in `counted`.
    left: list[tuple[int, int]] = []
    for tokens, own in documents:
        best = bisect_left(left, (tokens, 0))
        if best == len(left):
            left.append((length, len(counted)))
            counted.append(0.0)
        space, row = left.pop(best)
        counted[row] += own
        insort(left, (space - tokens, row))
    return counted


class Packing(Equipped):
    """TRL's packing strategies."""

    summary = "Packs several shuffled documents into each row, which avoids padding."
    options = (
        Option(NONE, "one document per row, padded to the longest of its micro-batch"),
        Option(CUTTING, "whole documents fitted into rows; documents longer than a row are cut"),
        Option(SPLIT, "as bfd, but the overflow continues in another row", Effect.CHANGES_TRAINING),
        Option(WRAPPED, "concatenated documents, cut anywhere, that attend to one another", Effect.CHANGES_TRAINING),
    )
    needs = "an architecture and attention that keep packed documents apart (checked)"
    changes = (
        "bfd_split splits documents that are longer than a row; wrapped cuts documents anywhere, and lets them attend "
        "to one another"
    )
    writes = frozenset({"args.packing", "args.packing_strategy", f"args.{SHUFFLED}"})
    identified_by = frozenset({"args.packing", "args.packing_strategy"})
    with_images = "TRL refuses it for rows with images"
    impact = SIZES

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Merge the splitting strategy with the cutting one if no document is longer than a row."""
        overflows = setting.workload.longest > int(candidate["max_length"])
        return CUTTING if choice == SPLIT and not overflows else choice

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason for rows with images, and unless the self-test passed (law 4)."""
        return super().unsuitable(choice, setting) or (never_separated(setting) if choice in SEPARATING else None)

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if a strategy that separates documents is combined with attention that does not."""
        return not_separated(candidate, setting) if choice in SEPARATING else None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """Return the entries, with further ones only if packing is on, so that plans without packing are equal.

        The data loader draws rows in random order anyway; shuffling before packing fills rows better and more evenly.
        """
        if choice == NONE:
            return {"args.packing": False}
        return {"args.packing": True, "args.packing_strategy": choice, f"args.{SHUFFLED}": True}
