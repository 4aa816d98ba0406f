"""The base of a search: the configuration of the user's own that it starts from, in the terms of techniques."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.core.candidate import Choice


@dataclass(frozen=True)
class Base:
    """A user's configuration as a candidate, with what is not part of candidates.

    Attributes:
        file: the file, as the user named it.
        choices: by technique, the choice that it has; of a technique without such a choice, the nearest.
        held: by technique that is not searched, why: another choice would not be the same training, or the user's own
            values are none of its choices.
        own: those of the held techniques whose values are none of its choices: their entries are in ``entries``.
        entries: by path, such as ``args.max_grad_norm``, the plan entries that every candidate has and that no
            technique writes, those in ``own`` apart.
        documents: by path, such as ``args.deepspeed``, the user's own document of an engine, without what tells a
            choice. Candidates that use the engine have it.
    """

    file: str
    choices: Mapping[str, Choice]
    held: Mapping[str, str] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    entries: Mapping[str, object] = field(default_factory=dict)
    documents: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
