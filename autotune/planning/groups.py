"""Which candidates share traces: those that differ in sizes alone, on micro-batches of the same kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autotune.core.candidate import Candidate, Choice
from autotune.core.gpu import Gpu
from autotune.core.plan import TrainingPlan
from autotune.core.protocol import TraceRequest
from autotune.core.setting import Setting
from autotune.planning.load import SIZES, Load
from autotune.planning.shape import Basis, Kind, Shape

# Gradients are held from the second micro-batch of a step on, so that two show all there is.
_TRACED_MICRO_BATCHES = 2
# An attention mask over all tokens of a row is computed for real while tracing: memory and time go with its square.
_LONGEST_FLAT = 2048
_TOKENS_STEP = 128
_DOCUMENTS = 4
# TRL's fused head takes so many tokens at once (TOKEN_CHUNK_SIZE of trl/kernels/chunked_logprob.py). What follows from
# fewer for more than these is an overestimate, since no chunk grows beyond it.
_CHUNK_TOKENS = 4096


@dataclass(frozen=True)
class Group:
    """Candidates that share traces.

    Attributes:
        choices: of all knobs that do not only choose sizes.
    """

    choices: Candidate
    kind: Kind

    @cached_property
    def facts(self) -> Mapping[str, Choice]:
        """What tells groups apart, the kind as if it were a knob."""
        return {**self.choices, "kind": self.kind.value}

    @cached_property
    def _hash(self) -> int:
        return hash((self.choices, self.kind))

    def __hash__(self) -> int:
        return self._hash

    def differences(self, other: Group) -> tuple[str, ...]:
        """Return the facts in which the groups differ."""
        theirs = other.facts
        return tuple(name for name, choice in self.facts.items() if theirs[name] != choice)


def group_of(candidate: Candidate, kind: Kind) -> Group:
    """Return the group of a candidate on micro-batches of a kind."""
    return Group(Candidate({knob: choice for knob, choice in candidate.items() if knob not in SIZES}), kind)


@dataclass(frozen=True)
class Anchors:
    """The shapes at which micro-batches of a kind are traced."""

    basis: Basis
    shapes: tuple[Shape, ...]


def anchors(kind: Kind, loads: Iterable[Load]) -> Anchors:
    """Return the shapes to trace, so that those of the loads follow from them."""
    shapes = {shape for load in loads if load.kind is kind for shape in (load.worst, load.typical)}
    if kind is Kind.FLAT:
        most = max(shape.tokens for shape in shapes)
        step = max(_TOKENS_STEP, min(_LONGEST_FLAT, int(most)) // 4 // _TOKENS_STEP * _TOKENS_STEP)
        return Anchors(Basis.TOKENS, tuple(Shape(1, step * times) for times in (1, 2, 4)))
    few = 1 if kind is Kind.EQUAL else 2
    tokens = sorted(shape.tokens for shape in shapes)
    longest, shortest = round(tokens[-1]), max(1, round(tokens[0] / 8) * 8)
    rows = _rows_to_trace(few, max(shape.rows for shape in shapes), longest)
    at_longest = tuple(Shape(count, longest) for count in rows)
    if longest == round(tokens[0]):
        return Anchors(Basis.ROWS, at_longest)
    shortest = shortest if shortest < longest else max(1, longest // 2)
    return Anchors(Basis.TOKENS, (*at_longest, Shape(rows[0], shortest)))


def _rows_to_trace(few: int, most: int, tokens: int) -> tuple[int, int]:
    """Return two numbers of rows for which the loss is computed in the same way: whole, or in chunks."""
    whole = _CHUNK_TOKENS // tokens
    if whole > few:
        return few, max(few + 1, min(most, whole))
    fewest = max(few, whole + 1)
    return fewest, max(fewest + 1, most)


def trace_request(
    plan: TrainingPlan, kind: Kind, shape: Shape, layers: int, setting: Setting, gpu: Gpu | None
) -> TraceRequest:
    """Return the request that traces a plan at a shape and a depth, whatever sizes the plan has."""
    tokens = int(shape.tokens)
    sizes: dict[str, object] = {
        "per_device_train_batch_size": shape.rows,
        "per_device_eval_batch_size": shape.rows,
        "gradient_accumulation_steps": _TRACED_MICRO_BATCHES,
        "max_length": tokens,
        "pad_to_multiple_of": None,
        "padding_free": False,
        "packing": kind is Kind.FLAT,
        **({"packing_strategy": "bfd"} if kind is Kind.FLAT else {}),
    }
    kept = {name: value for name, value in plan.args.items() if name != "packing_strategy"}
    dataset = setting.workload.dataset
    return TraceRequest(
        plan=replace(plan, args={**kept, **sizes}, truncate_to=None),
        model=setting.workload.model_source,
        target=setting.machine.hardware.kind,
        worst=tuple(_rows(kind, shape.rows, tokens)),
        trainable=round(dataset.trainable_tokens / dataset.lengths.tokens, 3),
        layers=layers,
        gpu=gpu,
    )


def _rows(kind: Kind, rows: int, tokens: int) -> Sequence[int]:
    match kind:
        case Kind.EQUAL:
            return (tokens,) * rows
        case Kind.PADDED:
            return (tokens, *[max(1, tokens // 2)] * (rows - 1))
        case Kind.FLAT:
            return (tokens // _DOCUMENTS,) * _DOCUMENTS
