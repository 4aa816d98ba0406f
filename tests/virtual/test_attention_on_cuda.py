"""Attention on a traced GPU: the operator that PyTorch selects, and the memory of FlexAttention.

The traces are made in a process of their own, because the device stays registered in it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autotune.probing import JobServer
from tests.virtual.alone import found_by

_SCRIPT = """
import json
import torch
from torch.nn import functional
from torch.nn.attention import flex_attention as flex_module
from autotune.virtual import trace

BATCH, HEADS, SHARED, TOKENS, HEAD = 2, 8, 2, 1024, 64


def tensors(device, dtype=torch.bfloat16, head=HEAD, shared=HEADS):
    return [
        torch.empty(BATCH, TOKENS, heads, head, dtype=dtype, device=device).transpose(1, 2).requires_grad_()
        for heads in (HEADS, shared, shared)
    ]


def sdpa(mask=None, **choices):
    def fn(device):
        q, k, v = tensors(device, **choices)
        bias = None if mask is None else torch.zeros(mask, dtype=q.dtype, device=device)
        out = functional.scaled_dot_product_attention(
            q, k, v, bias, is_causal=bias is None, enable_gqa=k.size(1) != q.size(1)
        )
        out.sum().backward()
    return fn


def without_gradients(**choices):
    def fn(device):
        with torch.no_grad():
            functional.scaled_dot_product_attention(*tensors(device, **choices), is_causal=True)
    return fn


def flex(mask_mod, lse=True, shared=SHARED, head=HEAD):
    def fn(device):
        q, k, v = tensors(device, shared=shared, head=head)
        mask = flex_module.create_block_mask(mask_mod(device), BATCH, None, TOKENS, TOKENS, device, _compile=True)
        aux = {"return_aux": flex_module.AuxRequest(lse=True)} if lse else {}
        out = flex_module.flex_attention(q, k, v, block_mask=mask, enable_gqa=True, **aux)
        (out[0] if lse else out).sum().backward()
    return fn


def causal(device):
    return lambda b, h, q, k: q >= k


def documents(device):
    number = torch.arange(TOKENS, device=device) // 256
    return lambda b, h, q, k: (number[q] == number[k]) & (q >= k)


CASES = {
    "ampere": (sdpa(), (8, 0)),
    "hopper": (sdpa(), (9, 0)),
    "blackwell": (sdpa(), (10, 0)),
    "consumer blackwell": (sdpa(), (12, 0)),
    "hopper, masked": (sdpa(mask=(BATCH, 1, TOKENS, TOKENS)), (9, 0)),
    "ampere, masked": (sdpa(mask=(BATCH, 1, TOKENS, TOKENS)), (8, 0)),
    "hopper, heads of 256": (sdpa(head=256), (9, 0)),
    "hopper, heads of 256, masked": (sdpa(head=256, mask=(BATCH, 1, TOKENS, TOKENS)), (9, 0)),
    "blackwell, heads of 256": (sdpa(head=256), (10, 0)),
    "blackwell, heads of 256, masked": (sdpa(head=256, mask=(BATCH, 1, TOKENS, TOKENS)), (10, 0)),
    "ampere, heads of 256": (sdpa(head=256), (8, 0)),
    "hopper, heads of 192": (sdpa(head=192), (9, 0)),
    "hopper, heads of 192, no gradients": (without_gradients(head=192), (9, 0)),
    "hopper, float32": (sdpa(dtype=torch.float32), (9, 0)),
    "ada, heads of 224": (sdpa(head=224), (8, 9)),
    "ampere, heads of 224": (sdpa(head=224), (8, 0)),
    "ampere, heads of 20": (sdpa(head=20, mask=(BATCH, 1, TOKENS, TOKENS)), (8, 0)),
    "hopper, shared": (sdpa(shared=SHARED), (9, 0)),
    "hopper, shared, float32": (sdpa(shared=SHARED, dtype=torch.float32), (9, 0)),
    "flex": (flex(causal), (8, 0)),
    "flex, documents": (flex(documents), (8, 0)),
    "flex, no lse": (flex(causal, lse=False), (8, 0)),
    "flex, small heads": (flex(causal, head=8), (8, 0)),
}
found = {}
for name, (fn, capability) in CASES.items():
    try:
        traced = trace(fn, capability=capability)
    except NotImplementedError as error:
        found[name] = {"error": str(error)}
        continue
    found[name] = {
        "operators": {operator.name: operator.work.flops for operator in traced.operators},
        "largest": max(event.change_bytes for event in traced.events),
        "made": {
            operator.name: [list(shape) for shape in operator.shapes] for operator in traced.operators
        },
        "left": sum(event.change_bytes for event in traced.events),
        "taken": sorted(event.change_bytes for event in traced.events if event.change_bytes > 0),
    }
print(json.dumps(found))
"""
_FLASH, _EFFICIENT, _CUDNN, _MATH = (
    f"aten.{name}.default"
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_softmax",
    )
)
_FLEX = "autotune_flex_attention.forward.default"
BATCH, HEADS, SHARED, TOKENS, HEAD = 2, 8, 2, 1024, 64


@pytest.fixture(scope="module")
def found(job_server: JobServer) -> dict[str, Any]:
    return dict(found_by(job_server, _SCRIPT))


@pytest.mark.parametrize(
    ("case", "operator"),
    [
        ("ampere", _FLASH),
        ("hopper", _CUDNN),
        ("blackwell", _CUDNN),
        ("consumer blackwell", _FLASH),
        ("hopper, masked", _CUDNN),
        ("ampere, masked", _EFFICIENT),
        ("hopper, heads of 256", _CUDNN),
        ("hopper, heads of 256, masked", _CUDNN),
        ("hopper, heads of 192", _CUDNN if torch.__version__ < (2, 14) else _FLASH),
        ("hopper, heads of 192, no gradients", _CUDNN),
        ("blackwell, heads of 256", _FLASH if torch.__version__ < (2, 14) else _CUDNN),
        ("blackwell, heads of 256, masked", _EFFICIENT if torch.__version__ < (2, 14) else _CUDNN),
        ("ampere, heads of 256", _FLASH),
        ("hopper, float32", _EFFICIENT),
        ("ada, heads of 224", _EFFICIENT),
        ("ampere, heads of 224", _FLASH),
        ("ampere, heads of 20", _MATH),
        ("hopper, shared", _CUDNN),
        ("hopper, shared, float32", _EFFICIENT if torch.__version__ >= (2, 14) else _MATH),
    ],
)
def test_attention_is_the_operator_that_cuda_would_choose(found: dict[str, Any], case: str, operator: str) -> None:
    chosen = {_FLASH, _EFFICIENT, _CUDNN, _MATH} & set(found[case]["operators"])

    assert chosen == {operator}


def test_cudnn_leaves_the_output_the_logarithms_and_the_state_of_the_generator(found: dict[str, Any]) -> None:
    made = found["hopper"]["made"][_CUDNN][3:]

    # The real operator on a null GPU returns these, and its backward pass takes no others.
    assert made == [[BATCH, HEADS, TOKENS, HEAD], [BATCH, HEADS, TOKENS, 1], [], []]


def test_flex_attention_holds_no_scores(found: dict[str, Any]) -> None:
    assert found["flex"]["largest"] == 2 * BATCH * HEADS * TOKENS * HEAD


def test_flex_attention_makes_the_output_the_logarithms_and_the_largest_scores(found: dict[str, Any]) -> None:
    made = found["flex"]["made"][_FLEX][3:]

    assert made == [[BATCH, HEADS, TOKENS, HEAD], [BATCH, HEADS, TOKENS], [BATCH, HEADS, TOKENS]]


def test_flex_attention_adds_gradients_up_over_heads_that_share_a_key(found: dict[str, Any]) -> None:
    gradients = found["flex"]["made"]["autotune_flex_attention.backward.default"][-3:]

    assert gradients == [[BATCH, HEADS, TOKENS, HEAD], *[[BATCH, SHARED, TOKENS, HEAD]] * 2]


def test_a_float32_per_query_and_head_is_there_for_each_of_delta_and_the_logarithms(found: dict[str, Any]) -> None:
    with_lse, without = (found[case]["taken"].count(4 * BATCH * HEADS * TOKENS) for case in ("flex", "flex, no lse"))

    # Forwards: logarithms and largest scores. Backwards: delta. Asked for, logarithms to another base and a gradient.
    assert (with_lse, without) == (5, 3)


def test_flex_attention_works_on_the_blocks_of_documents_alone(found: dict[str, Any]) -> None:
    blocks = TOKENS // 128
    pairs = BATCH * 128 * 128
    causal, documents = (found[case]["operators"][_FLEX] for case in ("flex", "flex, documents"))

    assert causal == 4 * HEADS * HEAD * pairs * blocks * (blocks + 1) / 2
    assert documents == 4 * HEADS * HEAD * pairs * 3 * 4


def test_heads_that_the_real_kernel_refuses_are_refused(found: dict[str, Any]) -> None:
    assert "must be at least 16" in found["flex, small heads"]["error"]


def test_nothing_is_left_when_attention_is_done(found: dict[str, Any]) -> None:
    assert {case: trace["left"] for case, trace in found.items() if trace.get("left")} == {}
