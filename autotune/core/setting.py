"""The setting of a search: everything that a technique's rules may depend on, except the candidate itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.core.candidate import Choice
from autotune.core.machine import Machine
from autotune.core.plan import TrainingPlan
from autotune.core.workload import Workload


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
        documents: by path, such as ``args.deepspeed``, the user's own engine document, without entries of
            techniques. Candidates that use the engine have it.
    """

    file: str
    choices: Mapping[str, Choice]
    held: Mapping[str, str] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    entries: Mapping[str, object] = field(default_factory=dict)
    documents: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


GLOBAL_BATCH = "global_batch"
"""The name in ``--allow`` for optimizer steps with another number of documents than was asked for."""


@dataclass(frozen=True)
class Wishes:
    """The user's options about single knobs.

    Attributes:
        fixed: by knob, the only choice to consider.
        excluded: knobs that stay at TRL's default, or at the value of the user's configuration.
    """

    fixed: Mapping[str, Choice] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Setting:
    """The properties that all candidates of a search share.

    Attributes:
        global_batch_size: documents per optimizer step, over all processes: rows of the dataset as the trainer takes
            them apart (KTO takes a pair for two), before it packs them.
        token_coverage: the share of dataset tokens, and of those that the loss counts, 0 to 1, that a candidate has to
            keep.
        allowed: knobs whose training-changing choices the user allowed by name; :data:`GLOBAL_BATCH` among them allows
            other global batches.
        base: the user's configuration that candidates start from; None: TRL's defaults.
        ranks_per_row: processes that share each row, as fixed by the user (``context_parallel``).
        last_resorts: whether choices are searched that are for where nothing else fits.
        wishes: the user's options about single knobs.
        loss_depends_on: by knob that the loss of the training depends on, how; see ``Trainer.loss_depends_on``.
        checked: the plan of a user's configuration that is checked; None elsewhere.
        impossible: by technique and choice, why it is impossible in every candidate, as far as that was asked.
    """

    workload: Workload
    machine: Machine
    global_batch_size: int
    token_coverage: float
    allowed: frozenset[str] = frozenset()
    base: Base | None = None
    ranks_per_row: int = 1
    last_resorts: bool = False
    wishes: Wishes = field(default_factory=Wishes)
    loss_depends_on: Mapping[str, str] = field(default_factory=dict)
    checked: TrainingPlan | None = None
    impossible: dict[tuple[object, Choice], str | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def documents_per_process(self) -> int:
        """Documents of an optimizer step per process, or per group of processes that share rows."""
        return self.global_batch_size * self.ranks_per_row // self.machine.hardware.processes

    def users_own(self, knob: str, choice: Choice) -> bool:
        """Return whether a choice is the user's own, so that it does not change the user's training."""
        return self.base is not None and self.base.choices.get(knob) == choice

    def users_entry(self, path: str) -> object:
        """Return a plan entry of the user's own configuration that no technique writes, or None without one."""
        if self.base is not None:
            return self.base.entries.get(path)
        return self.checked.entry(path) if self.checked is not None else None
