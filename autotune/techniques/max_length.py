"""``max_length``: the number of tokens to which rows are truncated or packed, or above which they are dropped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from autotune.core.candidate import Candidate, Choice
from autotune.core.documents.length_report import LengthLimit, limit
from autotune.core.rows.documents import Documents
from autotune.core.setting import Setting
from autotune.errors import InputError
from autotune.techniques.base import ON, POSITIVE, CrashReason, Option, Technique, TrainerFacts, differing, facts
from autotune.techniques.packing import CUTTING, NONE, SPLIT, WRAPPED, documents_per_row
from autotune.techniques.packing import NAME as PACKING
from autotune.techniques.trace_impact import GROWING_SIZES
from autotune.units import format_share

TRUNCATION, KEEP_END = "truncation_mode", "keep_end"
"""TRL's field, and its value that cuts rows at their beginning."""
# Strategies that move a row's overflow into the next row, so that no token is dropped.
_KEEP_OVERFLOW = frozenset({SPLIT, WRAPPED})
# Tensor cores work on tiles of 8 and more elements (NVIDIA, "Matrix Multiplication Background"), so a length that is
# not a multiple of 8 costs as much as the next one that is.
_ROUND_TO = 8
_COVERAGE = re.compile(r"coverage(?:\*(0*[1-9][0-9]*))?")
_BATCH = re.compile(r"batch/([1-9]\d*)")
# Iterations to find the length of packed rows that hold a number of documents; it converges after one or two.
_CORRECTIONS = 4
_SETTLED = 0.01
# Cache size, in lengths; a search space has a few.
_CACHED = 256


def least_coverage(candidate: Candidate, setting: Setting) -> float:
    """Return the smallest share, 0 to 1, that a candidate keeps of the tokens that a maximum length cuts."""
    if _cuts_loss_inputs(setting):
        return 1.0
    return min(_least_coverage(documents, candidate) for documents in setting.workload.cut_by_length.values())


def is_unlimited(length: Choice, candidate: Candidate, setting: Setting) -> bool:
    """Return whether a plan has no maximum length instead of this one, which is that of the longest row.

    With it, TRL would drop rows that the user's own configuration without a maximum length keeps, and would fail on a
    longer row with images if it cuts a token of an image. Packing needs a maximum length.
    """
    own = setting.base is not None and not setting.base.limits_rows
    return (
        (own or setting.workload.has_images)
        and candidate.get(PACKING, NONE) == NONE
        and length == setting.workload.longest
        and not _cuts_loss_inputs(setting)
    )


def limit_with(documents: Documents, length: int, packing: Choice) -> LengthLimit:
    """Return the tokens and rows that a maximum length keeps with a packing strategy."""
    if packing in _KEEP_OVERFLOW:
        return LengthLimit(length, coverage=1.0, rows_cut=0, tokens_dropped=0)
    return _limit(documents, length, dropping=packing == NONE)


_limit = lru_cache(_CACHED)(limit)
_least_at = lru_cache(_CACHED)(Documents.least_coverage)


def _least_coverage(documents: Documents, candidate: Candidate) -> float:
    packing = candidate.get("packing", NONE)
    if "max_length" not in candidate or packing in _KEEP_OVERFLOW:
        return 1.0
    return _least_at(documents, int(candidate["max_length"]), dropping=packing == NONE)


def _cuts_loss_inputs(setting: Setting) -> bool:
    """Whether the trainer cuts the inputs of the loss rather than rows of the dataset."""
    return bool(facts(MaxLength, setting.workload.trainer).changes)


class MaxLength(Technique):
    """Longer rows are truncated to this length, or dropped, as the trainer does; packed rows are filled up to it."""

    summary = "Length at which rows are cut or dropped; with packing, the length of a packed row."
    options = (
        Option("coverage", "the shortest length that keeps the requested token coverage"),
        Option("coverage*2", "twice that (also *4, *8): longer packed rows", family=_COVERAGE),
        Option("batch/2", "length at which 2 (any number) packed rows hold one process's documents", family=_BATCH),
        Option("longest", "the longest row of the dataset: nothing is cut or dropped"),
        Option(1024, "any number of tokens", family=POSITIVE),
    )
    trl_default = 1024
    by_trainer = differing(
        online_dpo=TrainerFacts(
            default=512,
            changes="log-probabilities of a completion are computed with more or less of the end of its prompt",
        )
    )
    writes = frozenset({"args.max_length", "truncate_to"})
    impact = GROWING_SIZES

    def parse(self, text: Choice, setting: Setting | None = None) -> Choice:
        """Return the number of tokens; without a setting, a symbolic word is returned unchanged."""
        word = super().parse(text)
        if setting is None or isinstance(word, int):
            return word
        if _cuts_loss_inputs(setting):
            raise InputError(
                f"{word!r} is not a choice of {self.name} here: it cuts no row of the dataset.",
                hint="Give a number of tokens, of a prompt and a completion together.",
            )
        workload = setting.workload
        if filling := _BATCH.fullmatch(word):
            return _length_holding(workload.dataset.documents, setting.documents_per_process / int(filling[1]))
        covering = _COVERAGE.fullmatch(word)
        if covering is None:
            return workload.longest
        cut = workload.cut_by_length.values()
        covered = (documents.shortest_covering(setting.token_coverage) for documents in cut)
        shortest = max(*covered, workload.least_length)
        return -(-shortest * int(covering[1] or 1) // _ROUND_TO) * _ROUND_TO

    def spellings(self, entries: Mapping[str, object], candidate: Candidate, setting: Setting) -> tuple[Choice, ...]:
        """Return the longest row for a configuration without a maximum length, which cuts no rows."""
        cuts = any(value is not None for value in entries.values())
        return () if cuts or _cuts_loss_inputs(setting) else ("longest",)

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Merge lengths beyond the longest row, which truncate nothing; with packing they still fill rows."""
        if candidate.get("packing", "none") != "none":
            return choice
        generated = int(candidate["max_new_tokens"]) if _cuts_loss_inputs(setting) else 0
        return min(int(choice), setting.workload.longest + generated)

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if a candidate drops all of the dataset, or more of it than the user allowed."""
        if _cuts_loss_inputs(setting):
            return None
        needed = setting.workload.least_length
        if int(choice) < needed:
            return CrashReason(
                f"max_length={choice} is below the {needed} tokens that rows with images need: training fails if an "
                "image token is cut, or if no tokens are left to train on"
            )
        if setting.users_entry(f"args.{TRUNCATION}") == KEEP_END and setting.workload.has_images:
            whole = is_unlimited(choice, candidate, setting)
            return None if whole else CrashReason(f"TRL refuses {TRUNCATION}={KEEP_END} for images with a max_length")
        length, packing = int(choice), candidate.get(PACKING, NONE)
        longest = length if packing == WRAPPED else min(length, setting.workload.longest)
        model = setting.workload.model
        if model.embeds_positions and (beyond := model.beyond_positions(longest)):
            return CrashReason(f"{beyond[:1].lower()}{beyond[1:-1]}")
        for whose, documents in setting.workload.cut_by_length.items():
            length_limit = limit_with(documents, length, packing)
            kept, rows = length_limit.coverage, length_limit.row_coverage
            if not kept:
                return (
                    f"max_length={choice} leaves none of the {whose} {documents.rows:,} rows; "
                    f"{documents.first_kept} or more keep some"
                )
            if kept < setting.token_coverage:
                of_rows = f" and {format_share(rows)} of its rows" if rows < 1.0 else ""
                return (
                    f"max_length={choice} keeps {format_share(kept)} of the {whose} tokens{of_rows}, "
                    f"and {format_share(setting.token_coverage)} of the tokens were requested"
                )
            least = _least_coverage(documents, candidate)
            if least < setting.token_coverage:
                return (
                    f"max_length={choice} keeps {format_share(kept)} of the {whose} tokens, but may keep only "
                    f"{format_share(least)} of those that the loss counts, and "
                    f"{format_share(setting.token_coverage)} were requested"
                )
        return _cuts_other_end(candidate, setting)

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """Return the entries of the length; for padding-free rows without packing, rows are truncated beforehand.

        TRL refuses a maximum length with these. See also :func:`is_unlimited`.
        """
        if candidate.get("padding_free") == ON and candidate["packing"] == "none":
            cuts = int(choice) < setting.workload.longest
            return {"args.max_length": None, "truncate_to": int(choice) if cuts else None}
        return {"args.max_length": None if is_unlimited(choice, candidate, setting) else int(choice)}


def _cuts_other_end(candidate: Candidate, setting: Setting) -> str | None:
    """Return a reason if rows lose their end instead of their beginning, as in the user's training, or vice versa."""
    base, length = setting.base, int(candidate["max_length"])
    if base is None or setting.users_entry(f"args.{TRUNCATION}") != KEEP_END or length >= setting.workload.longest:
        return None
    own, packing = base.choices.get(PACKING, NONE), candidate.get(PACKING, NONE)
    if (own == NONE) is (packing == NONE):
        return None
    return f"{TRUNCATION}={KEEP_END} keeps the end of rows longer than {length:,} tokens, and packing their beginning"


def _length_holding(documents: Documents, mean_documents: float) -> int:
    """Return the length, in tokens, at which packed rows hold ``mean_documents`` documents on average."""
    tokens = documents.tokens / documents.rows * mean_documents
    for _ in range(_CORRECTIONS):
        length = max(_ROUND_TO, round(tokens / _ROUND_TO) * _ROUND_TO)
        held = documents_per_row(documents, CUTTING, length)
        if abs(held / mean_documents - 1) <= _SETTLED:
            break
        tokens *= mean_documents / held
    return length
