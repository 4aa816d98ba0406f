"""Finds the smallest change of a configuration that makes it fit: of one technique, or of a few together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autotune.app.check.candidate import AsCandidate, lookup
from autotune.core.candidate import Candidate
from autotune.core.estimate import MemoryEstimate
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.planning.single import PlanTracer, Sized, UntraceableError, VllmError
from autotune.space import SpaceFile
from autotune.techniques.base import Effect, Technique
from autotune.trainers import Trainer
from autotune.trainers.evaluation import whole_geometry

# Techniques that a change may involve before it is no longer small.
_MOST_TECHNIQUES = 3
# Parts of a plan that a configuration file has keys for.
_WRITABLE = ("args", "model", "env")


@dataclass(frozen=True)
class Changed:
    """A configuration with a change.

    Attributes:
        keys: what changes, by the key's path in the file, such as ``("model_init_kwargs", "use_kernels")``.
        memory: the traced need afterwards.
    """

    keys: Mapping[tuple[str, ...], object]
    memory: MemoryEstimate


class Remedies:
    """Looks for changes of one plan that do not change what is trained.

    Args:
        known: the plan in the words of techniques.
        most_bytes: what an estimate may be at most, its error included, beyond the estimate's own.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        known: AsCandidate,
        trainer: Trainer,
        setting: Setting,
        file: SpaceFile,
        tracer: PlanTracer,
    ) -> None:
        self._plan = plan
        self._known = known
        self._trainer = trainer
        self._setting = setting
        self._file = file
        self._tracer = tracer

    def smallest(self, budget_bytes: int, extra_bytes: int) -> Changed | None:
        """Return the change of the fewest techniques whose need fits by more than its error; None if there is none.

        Of changes of one technique, the fastest that fits is taken, and one of unknown speed only if no other fits; if
        none fits, the one that saves the most is kept and another technique is changed as well.

        Args:
            extra_bytes: what a process holds beside its tensors.
        """
        candidate, entries = self._trainer.normal(self._known.candidate, self._setting), dict[str, object]()
        for _ in range(_MOST_TECHNIQUES):
            tried = [
                (other, {**entries, **changed}, memory)
                for other, changed in self._changes(candidate)
                if (memory := self._memory({**entries, **changed})) is not None
            ]
            fitting = [item for item in tried if item[2].most_bytes + extra_bytes <= budget_bytes]
            if fitting:
                best = min(fitting, key=lambda item: _quickest_first(item[2]))
                return Changed(_keys(best[1]), best[2])
            if not tried:
                return None
            candidate, entries, _ = min(tried, key=lambda item: item[2].device_bytes)
        return None

    def _changes(self, candidate: Candidate) -> Iterator[tuple[Candidate, Mapping[str, object]]]:
        """Yield candidates that differ in one technique and train the same, with the plan's entries that change."""
        own, seen = self._trainer.plan(candidate, self._setting), {candidate}
        for technique in self._trainer.techniques:
            name = technique.name
            if name not in self._known.exact or not technique.matters(self._setting):
                continue
            for spelling in self._file.choices.get(name, ()):
                choice = technique.parse(spelling, self._setting)
                other = self._trainer.normal(candidate.but(**{name: choice}), self._setting)
                if other in seen or not self._same_training(technique, candidate, other):
                    continue
                seen.add(other)
                if technique.impossible(choice, self._setting) or self._newly_illegal(candidate, other):
                    continue
                changed = self._mattering(_difference(own, self._trainer.plan(other, self._setting)))
                if changed and all(path.split(".")[0] in _WRITABLE for path in changed):
                    yield other, changed

    def _same_training(self, technique: Technique, candidate: Candidate, other: Candidate) -> bool:
        """Whether both train the same: what is exact is so beside TRL's default, and not beside any other choice."""
        name, setting = technique.name, self._setting
        effects = {technique.effect(item[name], item, setting) for item in (candidate, other)}
        from_default = candidate[name] == technique.default(setting)
        return effects == {Effect.EXACT} and (from_default or not technique.how_changes(self._trainer.name))

    def _mattering(self, entries: Mapping[str, object]) -> dict[str, object]:
        idle = {path for item in self._trainer.techniques if not item.matters(self._setting) for path in item.writes}
        return {path: value for path, value in entries.items() if path not in idle}

    def _newly_illegal(self, candidate: Candidate, other: Candidate) -> bool:
        after = self._trainer.illegal(other, self._setting)
        return after is not None and after != self._trainer.illegal(candidate, self._setting)

    def _memory(self, entries: Mapping[str, object]) -> MemoryEstimate | None:
        plan = _with(self._plan, entries)
        geometry = whole_geometry(self._trainer, plan, self._setting.workload)
        try:
            return self._tracer.memory(Sized(plan, geometry))
        except (UntraceableError, VllmError):
            return None


def _quickest_first(memory: MemoryEstimate) -> tuple[bool, float, int]:
    """Return a key to sort changes by: those of which no speed is predicted come last, the least memory first."""
    return memory.step_seconds is None, memory.step_seconds or 0.0, memory.device_bytes


def _difference(before: TrainingPlan, after: TrainingPlan) -> dict[str, object]:
    paths = {f"{part}.{name}" for plan in (before, after) for part in _WRITABLE for name in getattr(plan, part)}
    found = {path: lookup(after, path) for path in sorted(paths) if lookup(after, path) != lookup(before, path)}
    if before.truncate_to != after.truncate_to:
        found["truncate_to"] = after.truncate_to
    return found


def _with(plan: TrainingPlan, entries: Mapping[str, object]) -> TrainingPlan:
    parts = {part: dict(getattr(plan, part)) for part in _WRITABLE}
    for path, value in entries.items():
        part, _, name = path.partition(".")
        if value is None:
            parts[part].pop(name, None)
        else:
            parts[part][name] = value
    return replace(plan, args=parts["args"], model=parts["model"], env=parts["env"])


def _keys(entries: Mapping[str, object]) -> Mapping[tuple[str, ...], object]:
    """Return the keys of a configuration file for entries of a plan."""
    return {
        ("env", path.partition(".")[2]) if path.startswith("env.") else (path.partition(".")[2],): value
        for path, value in entries.items()
    }
