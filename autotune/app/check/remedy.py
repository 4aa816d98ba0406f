"""Finds the smallest change of a configuration that makes it fit, by traces: of one technique, or of a few together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autotune.app.check.need import memory_near
from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import MemoryEstimate
from autotune.core.files.nested import Key, set_or_remove
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.planning.single import PlanTracer, SizedPlan, UntraceableError, VllmError
from autotune.space import SpaceFile
from autotune.techniques.base import Effect, Technique, how_changes, impossible
from autotune.trainers.base import Trainer
from autotune.trainers.evaluation import whole_geometry
from autotune.userconfig.candidate import NearestCandidate
from autotune.userconfig.keys import PARTS, Writable

# Maximum number of techniques in a change.
_MAX_TECHNIQUES = 3


@dataclass(frozen=True)
class Changed:
    """A configuration with a change.

    Attributes:
        keys: the changes, by the key's path in the file, such as ``("model_init_kwargs", "use_kernels")``; None drops
            the key.
        memory: the traced need afterwards.
    """

    keys: Mapping[Key, object]
    memory: MemoryEstimate


@dataclass(frozen=True)
class Remedies:
    """Finds changes of one plan that keep the training the same.

    Attributes:
        nearest: the plan as a candidate.
        writable: the entries that the user's file can set.
    """

    plan: TrainingPlan
    nearest: NearestCandidate
    trainer: Trainer
    setting: Setting
    file: SpaceFile
    tracer: PlanTracer
    writable: Writable

    def smallest(self, budget_bytes: int, extra_bytes: int, *, heavy: bool = False) -> Changed | None:
        """Return the change of the fewest techniques whose need fits by more than its error; None if there is none.

        Among changes of one technique that fit, the fastest wins; unknown speeds come last. If none fits, the change
        that saves the most is kept and a second technique is changed as well. The result is traced in the way of a
        check of the changed configuration.

        Args:
            extra_bytes: memory of a process outside its tensors.
            heavy: whether the weights alone exceed the budget; changes that cannot reduce them are then not traced.
        """
        candidate, entries = self.trainer.normal(self.nearest.candidate, self.setting), dict[str, object]()
        for already in range(_MAX_TECHNIQUES):
            tried = [
                (other, {**entries, **changed}, memory)
                for technique, other, changed in self._changes(candidate)
                if (already or not heavy or technique.impact.frees_weights(other[technique.name]))
                and (memory := self._memory({**entries, **changed})) is not None
            ]
            for _, changed, memory in sorted(tried, key=lambda item: _quickest_first(item[2])):
                if memory.most_bytes + extra_bytes > budget_bytes:
                    continue
                near = self._memory(changed, budget_bytes)
                if near is not None and near.most_bytes + extra_bytes <= budget_bytes:
                    return Changed(self.writable.keys(changed), near)
            if not tried:
                return None
            candidate, entries, _ = min(tried, key=lambda item: item[2].device_bytes)
        return None

    def _changes(self, candidate: Candidate) -> Iterator[tuple[Technique, Candidate, Mapping[str, object]]]:
        """Yield candidates that differ in one technique and train the same, with the plan's entries that change."""
        own, seen = self.trainer.plan(candidate, self.setting), {candidate}
        for technique in self.trainer.techniques:
            name = technique.name
            if name not in self.nearest.exact or not technique.matters(self.setting):
                continue
            for spelling in self.file.choices.get(name, ()):
                choice = technique.parse(spelling, self.setting)
                other = self.trainer.normal(candidate.but(**{name: choice}), self.setting)
                if other in seen or not self._same_training(technique, candidate, other):
                    continue
                seen.add(other)
                if impossible(technique, choice, self.setting) or self._newly_illegal(candidate, other):
                    continue
                changed = self._difference(own, self.trainer.plan(other, self.setting))
                if changed and self.writable.allows(changed):
                    yield technique, other, changed

    def _same_training(self, technique: Technique, candidate: Candidate, other: Candidate) -> bool:
        """Whether both train the same; ``exact`` alone compares a choice with TRL's default, not with other choices."""
        name, setting = technique.name, self.setting
        effects = {technique.effect(item[name], item, setting) for item in (candidate, other)}
        from_default = candidate[name] == technique.default(setting)
        how = how_changes(technique, self.trainer.name, setting.loss_depends_on)
        return effects == {Effect.EXACT} and (from_default or not how)

    def _difference(self, before: TrainingPlan, after: TrainingPlan) -> dict[str, object]:
        """Return the entries of one plan that differ in another, without those of irrelevant techniques."""
        whole = frozenset(path for item in self.trainer.techniques for path in item.writes)
        idle = {path for item in self.trainer.techniques if not item.matters(self.setting) for path in item.writes}
        old, new = (
            dict(entry for part in (*PARTS, "truncate_to") for entry in _leaves(getattr(plan, part), part, whole))
            for plan in (before, after)
        )
        return {path: new.get(path) for path in sorted({*old, *new} - idle) if new.get(path) != old.get(path)}

    def _newly_illegal(self, candidate: Candidate, other: Candidate) -> bool:
        before, after = (set(self.trainer.violations(each, self.setting)) for each in (candidate, other))
        return not after <= before | {None}

    def _memory(self, entries: Mapping[str, object], budget_bytes: int | None = None) -> MemoryEstimate | None:
        """Return the memory with a change; None if it cannot be traced. With a budget, it is traced like a check."""
        plan = _with_entries(self.plan, entries)
        sized = SizedPlan(plan, whole_geometry(self.trainer, plan, self.setting.workload))
        try:
            if budget_bytes is not None:
                return memory_near(self.tracer, sized, budget_bytes)
            return self.tracer.memory(sized)
        except (UntraceableError, VllmError):
            return None


def _quickest_first(memory: MemoryEstimate) -> tuple[bool, float, int]:
    """Return a sort key for changes: those without a predicted speed come last, the least memory first."""
    return memory.step_seconds is None, memory.step_seconds or 0.0, memory.device_bytes


def _with_entries(plan: TrainingPlan, entries: Mapping[str, object]) -> TrainingPlan:
    parts = {part: dict(getattr(plan, part)) for part in PARTS}
    for path, value in entries.items():
        part, *names = path.split(".")
        set_or_remove(parts[part], names, value)
    return replace(plan, args=parts["args"], model=parts["model"], env=parts["env"])


def _leaves(value: object, path: str, whole: frozenset[str]) -> Iterator[tuple[str, object]]:
    """Yield the entries in a part of a plan by their paths; a mapping that a technique writes as a whole is one."""
    if path in whole or not isinstance(value, Mapping):
        yield path, value
        return
    for name, inside in value.items():
        yield from _leaves(inside, f"{path}.{name}", whole)
