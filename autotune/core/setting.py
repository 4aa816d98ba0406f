"""The setting of a search: everything that the rules of techniques depend on, except the candidate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.core.candidate import Choice
from autotune.core.machine import Machine
from autotune.core.plan import TrainingPlan
from autotune.core.workload import Workload


@dataclass(frozen=True)
class Base:
    """A user's configuration as a candidate, and its plan entries that techniques do not set.

    Attributes:
        file: the file, as the user named it.
        choices: by technique, the user's choice, or the nearest one.
        unsearched: by technique that keeps the user's choice, the reason: another choice would change the training, or
            the value is not among the choices.
        custom: the unsearched techniques whose value is not among the choices: their entries are in ``entries``.
        entries: by path, such as ``args.max_grad_norm``, the plan entries of every candidate that no technique sets,
            and those of ``custom``.
        documents: by path, such as ``args.deepspeed``, the user's own engine document, without entries of techniques;
            part of candidates that use the engine.
        limits_rows: whether it sets a maximum length. With any, TRL drops rows without a token in the loss.
    """

    file: str
    choices: Mapping[str, Choice]
    unsearched: Mapping[str, str] = field(default_factory=dict)
    custom: tuple[str, ...] = ()
    entries: Mapping[str, object] = field(default_factory=dict)
    documents: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    limits_rows: bool = True


GLOBAL_BATCH = "global_batch"
"""The name in ``--allow`` that permits another number of documents per optimizer step."""


@dataclass(frozen=True)
class Setting:
    """The properties that all candidates of a search share.

    Attributes:
        global_batch_size: documents per optimizer step, over all processes: rows of the dataset before packing (for
            KTO, a pair is two documents).
        token_coverage: least share, 0 to 1, of the dataset's tokens and of those in the loss that a candidate keeps.
        allowed: knobs whose training-changing choices the user allowed by name; :data:`GLOBAL_BATCH` allows other
            global batches.
        base: the user's configuration that candidates start from; None: TRL's defaults.
        ranks_per_row: processes that share each row, as fixed by the user (``context_parallel``).
        last_resorts: whether to search choices that are only useful if nothing else fits.
        fixed: by knob, the choice that the user fixed.
        excluded: knobs that stay at TRL's default, or at the value of the user's configuration.
        loss_depends_on: by knob that changes the loss, how; see ``Trainer.loss_depends_on``.
        checked: the plan of a configuration in ``autotune check``; None elsewhere.
        impossible: cache of the reasons why a technique's choice is impossible in every candidate, or None.
    """

    workload: Workload
    machine: Machine
    global_batch_size: int
    token_coverage: float
    allowed: frozenset[str] = frozenset()
    base: Base | None = None
    ranks_per_row: int = 1
    last_resorts: bool = False
    fixed: Mapping[str, Choice] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()
    loss_depends_on: Mapping[str, str] = field(default_factory=dict)
    checked: TrainingPlan | None = None
    impossible: dict[tuple[object, Choice], str | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def documents_per_process(self) -> int:
        """Documents of an optimizer step per process, or per group of processes that share rows."""
        return self.global_batch_size * self.ranks_per_row // self.machine.hardware.processes

    def is_users_choice(self, knob: str, choice: Choice) -> bool:
        """Return whether a choice is that of the user's own configuration, so that it changes nothing."""
        return self.base is not None and self.base.choices.get(knob) == choice

    def users_entry(self, path: str) -> object:
        """Return a plan entry of the user's own configuration that no technique sets, or None without one."""
        if self.base is not None:
            return self.base.entries.get(path)
        return self.checked.entry(path) if self.checked is not None else None
