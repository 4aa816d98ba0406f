"""Which candidates share traces: those that differ in sizes alone, on micro-batches of the same kind."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from autotune.core.candidate import Candidate, Choice
from autotune.core.gpu import Gpu
from autotune.core.plan import TrainingPlan
from autotune.core.protocol import TraceRequest
from autotune.core.setting import Setting
from autotune.planning.extrapolation.shape import Anchors, Basis, Kind, Shape
from autotune.planning.load import SIZES, Load
from autotune.planning.tracing.cache import fingerprint

# Gradients are held from the second micro-batch of a step on, so that two show all there is.
_TRACED_MICRO_BATCHES = 2
LONGEST_FLAT = 8192
"""The longest row that is traced where rows lie end to end: an attention mask over all of its tokens is computed for
real while tracing, and memory and time go with its square."""
_TOKENS_STEP = 128
_DOCUMENTS = 4
# TRL's fused head takes so many tokens at once (TOKEN_CHUNK_SIZE of trl/kernels/chunked_logprob.py).
_CHUNK_TOKENS = 4096
# Trainer arguments that choose the shape of micro-batches; a trace has its own.
_SIZES = frozenset(
    {
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "max_length",
        "pad_to_multiple_of",
        "padding_free",
        "packing",
        "packing_strategy",
    }
)

# What a plan may say that changes the model at hand at the most, and no class of a library; all else is taken to do so.
_CHANGES_NO_LIBRARY = frozenset(
    {
        "activation_offloading",
        "attn_implementation",
        "bf16",
        "bnb_4bit_quant_type",
        "dtype",
        "fp16",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "load_in_4bit",
        "load_in_8bit",
        "lora_alpha",
        "lora_dropout",
        "lora_r",
        "lora_target_modules",
        "optim",
        "use_dora",
        "use_peft",
        "use_rslora",
    }
)
KIND = "kind"
"""What the kind of rows is called where it is a fact like the choice of a knob."""


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
        return dict(self.choices) | {KIND: self.kind.value}

    @cached_property
    def _hash(self) -> int:
        return hash((self.choices, self.kind))

    def __hash__(self) -> int:
        return self._hash

    def differences(self, other: Group) -> tuple[str, ...]:
        """Return the facts in which the groups differ."""
        mine, theirs = self.facts, other.facts
        return tuple([name for name in mine if mine[name] != theirs[name]])


def group_of(candidate: Candidate, kind: Kind) -> Group:
    """Return the group of a candidate on micro-batches of a kind."""
    return Group(Candidate({knob: choice for knob, choice in candidate.items() if knob not in SIZES}), kind)


def anchors(kind: Kind, loads: Iterable[Load]) -> Anchors:
    """Return the shapes to trace, so that those of the loads follow from them."""
    shapes = {shape for load in loads if load.kind is kind for shape in (load.worst, load.typical)}
    most_tokens = round(max(shape.rows * shape.tokens for shape in shapes))
    if kind is Kind.FLAT:
        step = max(_TOKENS_STEP, min(_CHUNK_TOKENS, most_tokens) // 4 // _TOKENS_STEP * _TOKENS_STEP)
        known = tuple(Shape(1, step * times) for times in (1, 2, 4))
        beyond = Shape(1, min(most_tokens, LONGEST_FLAT)) if most_tokens > _CHUNK_TOKENS else None
        return Anchors(Basis.TOKENS, known, _CHUNK_TOKENS, beyond)
    few = 1 if kind is Kind.EQUAL else 2
    tokens = sorted(shape.tokens for shape in shapes)
    longest, shortest = round(tokens[-1]), max(1, round(tokens[0] / 8) * 8)
    most = max(few + 1, *(shape.rows for shape in shapes))
    whole = _CHUNK_TOKENS // longest
    several = min(most, whole) if whole > few else most
    at_longest = (Shape(few, longest), Shape(several, longest))
    # Where even the fewest rows are more than one chunk, all are computed in chunks.
    chunked = several < most
    limits = (float(several * longest), Shape(most, longest)) if chunked else (inf, None)
    if longest == round(tokens[0]):
        return Anchors(Basis.ROWS, at_longest, *limits)
    shortest = shortest if shortest < longest else max(1, longest // 2)
    return Anchors(Basis.TOKENS, (*at_longest, Shape(few, shortest)), *limits)


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
    dataset = setting.workload.dataset
    return TraceRequest(
        plan=replace(plan, args={**_without(_SIZES, plan.args), **sizes}, truncate_to=None),
        model=setting.workload.model_source,
        target=setting.machine.hardware.kind,
        worst=tuple(_rows(kind, shape.rows, tokens)),
        trainable=round(dataset.trainable_tokens / dataset.lengths.tokens, 3),
        layers=layers,
        gpu=gpu,
    )


def way_to_train(request: TraceRequest) -> str:
    """Return a text that is equal for requests whose plans differ in sizes alone."""
    return fingerprint(_without(_SIZES, request.plan.args), request.plan.model, request.model)


def libraries_of(request: TraceRequest) -> str:
    """Return a text that is equal for requests that leave libraries in the same way, and so may share a process.

    Libraries such as Liger change the classes of models, which stay changed as long as their process lives.
    """
    kept = _SIZES | _CHANGES_NO_LIBRARY
    args, words = request.plan.args, request.plan.model
    return fingerprint(_without(kept, args), _without(kept, words), request.model, request.target)


def _without(names: Collection[str], fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name not in names}


def _rows(kind: Kind, rows: int, tokens: int) -> Sequence[int]:
    match kind:
        case Kind.EQUAL:
            return (tokens,) * rows
        case Kind.PADDED:
            # Padding brings the mask, and rows nearly as long as the longest all the tokens that a loss can count.
            return (*[tokens] * (rows - 1), max(1, tokens - 1))
        case Kind.FLAT:
            return (tokens // _DOCUMENTS,) * _DOCUMENTS
