"""Training on a null GPU: PyTorch's own code, Triton's compiled kernels, bitsandbytes, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.units import MIB
from tests.nullgpu.machine import NEEDS_CUDA_BUILD, NullMachine

pytestmark = NEEDS_CUDA_BUILD

LLAMA = """
    import ctypes, json, torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    config = LlamaConfig(vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=2,
                         num_attention_heads=8, num_key_value_heads=4)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found = {"weights": weights, "constructed": torch.cuda.memory_allocated()}
    for _ in range(2):
        tokens = torch.randint(0, 4096, (2, 512), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        found["gradients"] = sum(each.grad.numel() * each.grad.element_size() for each in model.parameters())
        optimizer.zero_grad()
    state = sum(value.numel() * value.element_size() for each in optimizer.state.values() for value in each.values())
    # CDLL of the process itself: what was preloaded is there.
    launches = ctypes.CDLL(None).nullgpu_launches
    launches.restype = ctypes.c_uint64
    found |= {"state": state, "peak": torch.cuda.max_memory_allocated(), "launches": launches(),
              "reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.memory_allocated()}
    print(json.dumps(found))
"""

LIGER = """
    import json, torch
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    from liger_kernel.transformers import LigerRMSNorm
    a, b = (torch.randn(64, 1024, device="cuda", requires_grad=True) for _ in range(2))
    norm = LigerRMSNorm(1024).cuda()
    out = norm(LigerSiLUMulFunction.apply(a, b))
    out.sum().backward()
    print(json.dumps([list(out.shape), list(a.grad.shape), list(norm.weight.grad.shape)]))
"""

BITSANDBYTES = """
    import json, torch, bitsandbytes as bnb
    linear = bnb.nn.Linear4bit(512, 512, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").cuda()
    packed = linear.weight.numel() * linear.weight.element_size()
    x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    linear(x).sum().backward()
    model = torch.nn.Linear(512, 512, device="cuda")
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    paged = bnb.optim.PagedAdamW8bit(model.parameters())
    for each in (optimizer, paged):
        model(torch.randn(4, 512, device="cuda")).sum().backward()
        each.step()
    state = optimizer.state[model.weight]
    print(json.dumps([packed, list(x.grad.shape), str(state["state1"].dtype), list(state["state1"].shape)]))
"""

ATTENTION = """
    import json, torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    found = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            q, k, v = (torch.randn(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            out.backward(torch.ones_like(out))
            found.append(out.grad_fn.name())
    print(json.dumps(found))
"""

OFFLOADED = """
    import json, torch
    from torch.nn.attention.flex_attention import flex_attention
    from torch.utils.checkpoint import checkpoint
    from trl.models.activation_offloading import OffloadActivations
    compiled, found = torch.compile(flex_attention), []
    for heads, checkpointed in ((4, False), (4, True), (1, False)):
        states = torch.randn(1, 256, heads, 64, device="cuda", requires_grad=True)
        def attend(states):
            return compiled(*((states * times).transpose(1, 2) for times in (1, 2, 3))).transpose(1, 2).contiguous()
        try:
            with OffloadActivations():
                out = checkpoint(attend, states, use_reentrant=False) if checkpointed else attend(states)
                out.sum().backward()
            found.append("trained")
        except AssertionError as error:
            found.append(str(error))
    print(json.dumps(found))
"""

NARROW = """
    import json, torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    found = {}
    for tokens in (64, 65, 127, 128):
        torch._dynamo.reset()
        q, k, v = (torch.randn(2, heads, tokens, 64, device="cuda", requires_grad=True) for heads in (4, 2, 2))
        mask = create_block_mask(lambda b, h, i, j: i >= j, 2, None, tokens, tokens, device="cuda")
        try:
            torch.compile(flex_attention)(q, k, v, block_mask=mask, enable_gqa=True)
            found[tokens] = "attends"
        except Exception as error:
            found[tokens] = str(error)
    print(json.dumps(found))
"""

SCALED = """
    import json, torch
    found = {}
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        gradients, number = [torch.ones(8, device="cuda", dtype=kind)], torch.ones(1, device="cuda")
        try:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, number, number)
            found[str(kind)] = ""
        except NotImplementedError as error:
            found[str(kind)] = str(error)
    print(json.dumps(found))
"""

GROUPED = """
    import json, torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from autotune.virtual.kernels.cuda import scratch
    from autotune.virtual.recording.records import Capabilities
    q, k, v = (torch.randn(2, heads, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for heads in (8, 2, 2))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    given = torch.ones_like(out)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = torch.autograd.grad(out, (q, k, v), given)
    peak = torch.cuda.max_memory_allocated() - before
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    workspace = scratch(backward, (given, q, k, v), {}, None, gpus=Capabilities(torch.cuda.get_device_capability()))
    print(json.dumps([peak, sum(each.nbytes for each in made), *workspace]))
"""

OPERATORS = """
    import functools, json, torch
    from autotune.virtual import trace
    from autotune.virtual.operators.calls import arguments_of
    from tests.virtual.cuda_cases import run_case
    if __name__ == "__main__":
        traced = trace(functools.partial(run_case, "llama, checkpointed"), capability=(9, 0))
        names, refused = set(), {}
        for call in {record.call for record in traced.operators if record.call}:
            func, args, kwargs = arguments_of(call, torch.device("cuda"))
            names.add(str(func))
            try:
                with torch.no_grad():
                    func(*args, **kwargs)
            except RuntimeError as error:
                refused[call] = str(error)
        print(json.dumps([sorted(names), refused]))
"""

REFUSED = """
    import json, sys, torch
    try:
        x = torch.randn(64, 64, device="cuda")
        if sys.argv[1] == "graph":
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                x + 1
        elif sys.argv[1] == "fft":
            torch.fft.fft(x)
        else:
            torch.linalg.qr(x)
        print(json.dumps("done"))
    except RuntimeError as error:
        print(json.dumps(str(error)))
"""


# A network of convolutions, as for images; cuDNN normalises over the batch.
CONVOLVED = """
    import json, torch
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).cuda()
    for layout in (torch.contiguous_format, torch.channels_last):
        images = torch.randn(4, 3, 32, 32, device="cuda").to(memory_format=layout)
        layers.to(memory_format=layout)(images).sum().backward()
    print(json.dumps([each.grad is not None for each in layers.parameters()]))
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a process prints that runs these one after another; the first counts what the process holds."""
    machine = NullMachine(tmp_path_factory.mktemp("trained") / "table")
    return machine.run_all(LLAMA, SCALED, ATTENTION, GROUPED, CONVOLVED)


def test_a_llama_trains_with_fused_adamw(shown: list[Any]) -> None:
    found = shown[0]
    # Each allocation is a multiple of 512 bytes.
    assert found["weights"] <= found["constructed"] <= found["weights"] + MIB
    assert found["gradients"] == found["weights"]
    # Two moments in the type of the weights, and a step of 4 bytes for each of the parameters.
    assert 2 * found["weights"] < found["state"] < 2 * found["weights"] + 1000
    assert 4 * found["weights"] < found["peak"] <= found["reserved"]
    assert found["launches"] > 100


@pytest.mark.nightly
def test_kernels_that_triton_compiles_are_launched(machine: NullMachine) -> None:
    assert machine.run(LIGER) == [[64, 1024], [64, 1024], [1024]]


@pytest.mark.nightly
def test_bitsandbytes_quantises_and_optimises(machine: NullMachine) -> None:
    assert machine.run(BITSANDBYTES) == [512 * 512 // 2, [4, 512], "torch.uint8", [512, 512]]


def test_gradients_in_bfloat16_are_not_scaled(shown: list[Any]) -> None:
    found = dict(shown[1])
    # Where this is empty, a release has a kernel for it: the refusal of `autotune.virtual.patches.unsupported` can go.
    assert "not implemented for 'BFloat16'" in found.pop("torch.bfloat16")
    assert set(found.values()) == {""}


def test_each_attention_kernel_can_be_asked_for(shown: list[Any]) -> None:
    assert shown[2] == [
        "ScaledDotProductFlashAttentionBackward0",
        "ScaledDotProductEfficientAttentionBackward0",
        "ScaledDotProductCudnnAttentionBackward0",
    ]


@pytest.mark.nightly
def test_flex_attention_of_several_heads_fails_on_what_trl_offloads_outside_of_checkpoints(
    machine: NullMachine,
) -> None:
    plain, checkpointed, single = machine.run(OFFLOADED, TORCHINDUCTOR_COMPILE_THREADS="1")
    # Where this trains, a release has mended it: the rule of `activation_offloading` can go.
    assert "stride" in plain
    assert [checkpointed, single] == ["trained", "trained"]


@pytest.mark.nightly
def test_flex_attention_of_shared_heads_has_no_kernel_for_some_widths(machine: NullMachine) -> None:
    found = machine.run(NARROW, TORCHINDUCTOR_COMPILE_THREADS="1")
    # Where all attend, a release has mended it: the rule of `attention` can go. No kernel has run: a GPU is as this.
    assert [found[tokens] for tokens in ("64", "128")] == ["attends", "attends"]
    assert all("NoValidChoicesError" in found[tokens] for tokens in ("65", "127"))


def test_cudnns_frontend_asks_for_the_workspace_that_a_trace_counts(shown: list[Any]) -> None:
    peak, gradients, workspace = shown[3]
    # Blocks are multiples of 512 bytes.
    assert 0 <= peak - gradients - workspace < 1024


def test_a_network_with_batch_normalisation_trains(shown: list[Any]) -> None:
    assert shown[4] == [True] * 4


@pytest.mark.nightly
def test_every_operator_of_a_step_on_hopper_runs_by_itself(machine: NullMachine) -> None:
    names, refused = machine.run(OPERATORS)
    assert "aten._scaled_dot_product_cudnn_attention_backward.default" in names
    assert refused == {}


# By day, a dry run answers by the name of what is refused: tests/nullgpu/test_dry_run.py.
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("what", "function", "belongs_to"),
    [
        ("graph", "cudaStreamBeginCapture", "CUDA graphs"),
        ("fft", "cufft", "Fourier transforms"),
        ("qr", "cusolverDn", "dense linear algebra"),
    ],
)
def test_what_cannot_be_stood_in_for_is_refused_by_name(
    machine: NullMachine, what: str, function: str, belongs_to: str
) -> None:
    with machine.start(REFUSED, what, variables=machine.environment()) as process:
        out, err = process.communicate(timeout=200)
    assert "done" not in out
    assert f"a null GPU cannot stand in for {function}" in err
    assert belongs_to in err
    if what == "graph":
        assert "cannot stand in for cudaStreamBeginCapture (CUDA graphs)" in out
