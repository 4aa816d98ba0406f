"""FlexAttention in a trace: block masks and attention, with the allocations of the compiled functions."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from autotune.virtual.kernels.block_mask import INDICES, block_mask_on, guard_key, mask_tensors, pairs_of
from autotune.virtual.operators.custom import define_operators
from autotune.virtual.patches.autocast import cast
from autotune.virtual.patches.libraries import Patches
from autotune.virtual.recording.ledger import Ledger
from autotune.virtual.recording.tensors import VIRTUAL, storage_of

_NAMESPACE = "autotune_flex_attention"
# PyTorch's functions by the modules that import them.
_IMPORTERS = {
    "torch.nn.attention.flex_attention": ("flex_attention", "create_block_mask"),
    "transformers.integrations.flex_attention": ("flex_attention", "create_block_mask"),
    "transformers.masking_utils": ("create_block_mask",),
}
# torch/_inductor/kernel/flex/flex_attention.py, flex_attention: the smallest dimension of a Triton matrix product.
_MIN_HEAD_SIZE = 16
# Dimension of the tokens in queries, keys and values: [batch, heads, tokens, head].
_TOKENS = 2
_MIN_QUERIES = 128
# In these releases, the arguments of a compiled call stay referenced after compilation; see `_leak`.
KEEPS_ARGUMENTS: bool = (2, 12) <= torch.__version__ < (2, 14)
_MASK = "mask"
"""Prefix of the names of what a mask function captures."""


def flex_attention_compiled(ledger: Ledger) -> Patches:
    """Patch FlexAttention and block masks to allocate like the compiled functions, which transformers uses.

    The workspace of the kernel for fewer than 128 queries (``flex_decoding.py``) is not counted.
    """
    stand_ins: dict[str, Callable[..., Any]] = {
        "flex_attention": _flex_attention,
        "create_block_mask": _create_block_mask,
    }
    for name in _IMPORTERS.keys() & sys.modules.keys():
        for function in _IMPORTERS[name]:
            real = getattr(sys.modules[name], function)
            yield mock.patch.object(sys.modules[name], function, partial(stand_ins[function], real))
    integration = sys.modules.get("transformers.integrations.flex_attention")
    if integration is not None:
        yield mock.patch.object(integration, "compile_friendly_flex_attention", _compiled(integration, ledger))


def _compiled(integration: Any, ledger: Ledger) -> Callable[..., Any]:
    real = integration.compile_friendly_flex_attention
    versions = Versions()

    def run(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **words: Any) -> Any:
        if query.device.type == "cpu":
            return real(query, key, value, training=training, **words)
        given = query, key, value
        if KEEPS_ARGUMENTS:
            kind, numbers = guards_of(given, words.get("block_mask"))
            version = versions.compiled_for(kind, numbers)
            padded = any(name.startswith(_MASK) and ".size" in name for name in numbers)
            if version is not None:
                _leak(ledger, given, version, padded=padded)
        return integration.flex_attention(query, key, value, **words)

    return run


class Versions:
    """The compiled versions of one function, with their guards on the kind of call and on its numbers.

    Dynamo's first compilation specialises on all numbers of the call. A number that differs between compilations is
    symbolic in all later ones, of every kind of call (``torch/_dynamo/pgo.py``, FrameStateSizeEntry). 0 and 1 are
    always constants (``specialize_zero_one``, ``torch/fx/experimental/_config.py``).
    """

    def __init__(self) -> None:
        self._seen: dict[str, int | None] = {}
        self._versions: dict[Hashable, list[dict[str, int | None]]] = {}

    def compiled_for(self, kind: Hashable, numbers: Mapping[str, int]) -> Mapping[str, int | None] | None:
        """Return the version that is compiled for a call, or None if the guards of an earlier version accept it.

        Args:
            kind: all guarded properties of the call except numbers.
            numbers: the sizes and integers of the call, by name.

        Returns:
            the constant for each number, or None if it is symbolic.
        """
        versions = self._versions.setdefault(kind, [])
        if any(_accepts(version, numbers) for version in versions):
            return None
        for name, number in numbers.items():
            self._seen[name] = number if self._seen.get(name, number) == number else None
        version = {name: number if number in (0, 1) else self._seen[name] for name, number in numbers.items()}
        versions.append(version)
        return version


def _accepts(version: Mapping[str, int | None], numbers: Mapping[str, int]) -> bool:
    return version.keys() == numbers.keys() and all(
        number > 1 if version[name] is None else number == version[name] for name, number in numbers.items()
    )


def _leak(ledger: Ledger, arguments: tuple[Tensor, ...], version: Mapping[str, int | None], *, padded: bool) -> None:
    """Record that the arguments of a compiled call leak, including those of micro-batches that are not traced.

    In PyTorch 2.12 and 2.13, Dynamo's side effects refer to the arguments of the compiled call (``keepalive`` in
    ``torch/_dynamo/side_effects.py``) from a reference cycle, which Python's garbage collector rarely collects.
    """
    again = ledger.again
    # A version with a symbolic width accepts all other widths. A micro-batch without padding has another mask, so it is
    # compiled separately.
    fixed = any(version[f"{place}.{_TOKENS}"] not in (None, 1) for place in ("query", "key"))
    # A trace generates for the rows of its micro-batch, a real run for all rows of the plan's generation.
    share = again.generated / arguments[0].size(0) if ledger.generates and again.generated else 1.0
    # Queries, keys and values may be views of one storage.
    for tensor in {storage_of(tensor)._cdata: tensor for tensor in arguments}.values():
        if share == 1.0:
            ledger.keep(tensor)
        else:
            ledger.record_leaked_copy(tensor, share)
        ledger.record_leaked_copy(tensor, share * fixed * again.narrower)
        ledger.record_leaked_copy(tensor, share * padded * again.unpadded)


def guards_of(given: tuple[Tensor, ...], block_mask: Any) -> tuple[Any, dict[str, int]]:
    """Return the guards of a compiled call of FlexAttention: a key of all properties except numbers, and the numbers.

    Args:
        given: queries, keys and values.
    """
    numbers = {
        f"{place}.{dimension}": size
        for place, tensor in zip(("query", "key", "value"), given, strict=True)
        for dimension, size in enumerate(tensor.shape)
    }
    mask = None
    if block_mask is not None:
        indices = {name: getattr(block_mask, name) for name in INDICES}
        mask = guard_key(block_mask.mask_mod, _MASK, numbers), guard_key(list(indices.values()), "blocks", numbers)
    # torch/_inductor/kernel/flex/flex_decoding.py, _use_flex_decoding: fewer queries use another kernel.
    is_short = given[0].size(_TOKENS) < _MIN_QUERIES
    kinds = ((tensor.dtype, tensor.requires_grad) for tensor in given)
    return (torch.is_grad_enabled(), is_short, mask, *kinds), numbers


def _create_block_mask(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(real).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    if given["device"] is None or torch.device(given["device"]).type != VIRTUAL:
        return real(*args, **kwargs)
    shape = (given["B"] or 1, given["H"] or 1, given["Q_LEN"], given["KV_LEN"])
    size = given["BLOCK_SIZE"]
    size = (size, size) if isinstance(size, int) else size
    return block_mask_on(torch.device(given["device"]), given["mask_mod"], shape, size)


def _flex_attention(
    real: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """``flex_attention``: tensors are [batch, heads, tokens, head]."""
    if query.device.type != VIRTUAL:
        more = {"return_aux": return_aux} if return_aux is not None else {}
        return real(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, **more)
    heads = query.size(-1), value.size(-1)
    if min(heads) < _MIN_HEAD_SIZE:
        raise NotImplementedError(
            f"NYI: embedding dimension of the query, key, and value must be at least {_MIN_HEAD_SIZE} "
            f"but got E={heads[0]} and Ev={heads[1]}"
        )
    if torch.is_autocast_enabled(VIRTUAL):
        # torch/_higher_order_ops/flex_attention.py, _flex_attention_autocast_impl.
        query, key, value = cast((query, key, value), torch.get_autocast_dtype(VIRTUAL))
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    saved = mask_tensors(block_mask)
    out, lse, max_scores = _Flex.apply(query, key, value, wants_lse, pairs_of(block_mask, query, key), *saved)
    if return_aux is None:
        return (out, lse) if return_lse else out
    from torch.nn.attention.flex_attention import AuxOutput

    return out, AuxOutput(lse=lse, max_scores=max_scores if return_aux.max_scores else None)


class _Flex(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, wants_lse: bool, pairs: int, *saved: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        out, lse, max_scores = torch.ops.autotune_flex_attention.forward(q, k, v, pairs)
        ctx.save_for_backward(q, k, v, out, lse, *saved)
        ctx.pairs, ctx.wants_lse = pairs, wants_lse
        ctx.mark_non_differentiable(max_scores)
        ctx.set_materialize_grads(False)
        # torch/nn/attention/flex_attention.py, _finalize_outputs: the kernel returns logarithms to base two.
        return out, lse * math.log(2) if wants_lse else None, max_scores

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> Any:
        q, k, v, out, lse, *saved = ctx.saved_tensors
        # In a compiled function, missing gradients of outputs are zeros (torch/_functorch/_aot_autograd/
        # runtime_wrappers.py keeps autograd's default, set_materialize_grads(True)).
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = torch.zeros_like(lse) if ctx.wants_lse and dlse is None else dlse
        dq, dk, dv = torch.ops.autotune_flex_attention.backward(dout, dlse, q, k, v, out, lse, ctx.pairs)
        return dq, dk, dv, None, None, *(None for _ in saved)


def _forward(q: Tensor, k: Tensor, v: Tensor, pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    # torch/_inductor/kernel/flex/flex_attention.py, flex_attention: the output has the stride order of the query; the
    # float32 log-sum-exp and maximum scores are written even if they are not requested.
    order = sorted(range(4), key=lambda dimension: -q.stride(dimension))
    out = torch.empty_permuted((*q.shape[:3], v.size(3)), order, dtype=q.dtype, device=q.device)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: int
) -> tuple[Tensor, Tensor, Tensor]:
    # The same file, flex_attention_backward: the kernel sums over the query heads that share a key, so the gradients of
    # keys and values have their sizes.
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def backward_workspace(query: Tensor) -> tuple[int, ...]:
    """Return the sizes in bytes of the backward pass's workspaces: ``delta``, a float32 per query and head.

    Source: ``flex_attention_backward`` of ``torch/_inductor/kernel/flex/flex_attention.py``.
    """
    return (4 * query.shape[:3].numel(),)


_FORWARD = "(Tensor q, Tensor k, Tensor v, int pairs) -> (Tensor, Tensor, Tensor)"
_BACKWARD = (
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int pairs)"
    " -> (Tensor, Tensor, Tensor)"
)
_LIBRARY = define_operators(_NAMESPACE, (_FORWARD, _forward), (_BACKWARD, _backward), heads=1)
