"""What a trainer is: which techniques it has, what is legal, and how a candidate becomes a training plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.core.candidate import Candidate
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.techniques import catalogue
from autotune.techniques.base import Effect, Technique

# Normal forms may depend on one another (padding_free on packing, packing on max_length), but not in circles; two
# passes settle the present catalogue and a test holds that a third changes nothing.
_NORMAL_PASSES = 2


@dataclass(frozen=True)
class Trainer:
    """One trainer of TRL.

    Attributes:
        name: what ``trl`` and ``--trainer`` call it.
        cpu_args: configuration fields that training on a CPU needs.
        cuda_args: configuration fields that training on a GPU needs.
    """

    name: str
    cpu_args: Mapping[str, object] = field(default_factory=dict)
    cuda_args: Mapping[str, object] = field(default_factory=dict)

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """The techniques that this trainer has."""
        return catalogue(self.name)

    def normal(self, candidate: Candidate, setting: Setting) -> Candidate:
        """Return the candidate that stands for all that come to the same plan."""
        for _ in range(_NORMAL_PASSES):
            candidate = Candidate(
                {item.name: item.normal(candidate[item.name], candidate, setting) for item in self.techniques}
            )
        return candidate

    def illegal(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return why a candidate may not be tried or recommended, in words, or None when it may."""
        for technique in self.techniques:
            choice = candidate[technique.name]
            impossible = technique.unavailable(choice, setting.machine) or technique.unsuitable(choice, setting)
            if impossible:
                return f"{technique.name}={choice}: {impossible}"
            conflict = technique.conflict(choice, candidate, setting)
            if conflict:
                return conflict
            changes = technique.effect(choice, candidate, setting) is Effect.CHANGES_TRAINING
            if changes and technique.name not in setting.allowed:
                return (
                    f"{technique.name}={choice} changes training here ({technique.changes}) "
                    f"and was not allowed (--allow {technique.name})"
                )
        return None

    def plan(self, candidate: Candidate, setting: Setting) -> TrainingPlan:
        """Return the training plan of a candidate."""
        device_args = self.cpu_args if setting.machine.hardware.kind == "cpu" else self.cuda_args
        tree: dict[str, object] = {"args": {}, "model": {}, "truncate_to": None}
        for path, value in device_args.items():
            _put(tree, f"args.{path}", value)
        for technique in self.techniques:
            for path, value in technique.plan(candidate[technique.name], candidate, setting).items():
                _put(tree, path, value)
        args, model, truncate_to = tree["args"], tree["model"], tree["truncate_to"]
        assert isinstance(args, dict)
        assert isinstance(model, dict)
        assert truncate_to is None or isinstance(truncate_to, int)
        return TrainingPlan(self.name, args, model, truncate_to)


def _put(tree: dict[str, object], path: str, value: object) -> None:
    head, _, rest = path.partition(".")
    if not rest:
        tree[head] = value
        return
    branch = tree.setdefault(head, {})
    assert isinstance(branch, dict)
    _put(branch, rest, value)
