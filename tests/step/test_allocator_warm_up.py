"""What transformers takes from the caching allocator before it loads weights to a GPU, in a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import modeling_utils

from autotune.step.models import loading
from autotune.units import GIB, MIB
from tests.virtual.models import config_of

_SCRIPT = """
import json, sys
import torch
from autotune.step.models.loading import virtual_model
from autotune.virtual import trace
from tests.virtual.models import config_of

kept, events = [], []
for how in ({}, {"device_map": "auto"}, {"device_map": None}, {"device_map": {"": 0}}):
    loading = {"dtype": "float32", "attn_implementation": "sdpa", **how}
    traced = trace(lambda device: kept.append(virtual_model(config_of("llama"), loading, None, device)))
    events.append([event.change_bytes for event in traced.events])
weights = {id(tensor): tensor.numel() * 4 for tensor in kept[0].parameters()}
json.dump([sum(weights.values()), events], open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[list[int]]]:
    """Bytes of the weights of a model whose head is its embedding, and the sizes of what was allocated and freed.

    The sizes come for each way to choose the model's devices: spread over devices twice, and on a given one twice.
    """
    file = tmp_path_factory.mktemp("built") / "found.json"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-W", "ignore", "-c", _SCRIPT, str(file)], check=True, env=environment, timeout=250)
    weights, events = json.loads(file.read_text())
    return weights, events


def test_a_number_is_allocated_and_freed_before_where_layers_are_spread_by_the_memory_of_devices(
    found: tuple[int, list[list[int]]],
) -> None:
    by_default, spread, *given = found[1]

    assert by_default[:2] == spread[:2] == [8, -8]
    # The weights fit into the segment of that number, so that there is no block for them.
    assert by_default[2:] == spread[2:] == given[0][2:] == given[1][2:]


def test_one_block_for_all_weights_is_allocated_and_freed_before_them(found: tuple[int, list[list[int]]]) -> None:
    weights, [*_, events] = found

    assert events[:2] == [weights, -weights]
    assert max(events[2:]) < weights


def test_each_weight_is_allocated_once_though_two_modules_have_it(found: tuple[int, list[list[int]]]) -> None:
    weights, [*_, events] = found
    frequencies = 2 * 4 * 16 // 2

    assert sum(events[2:]) == weights + frequencies
    assert all(size > 0 for size in events[2:])


@pytest.mark.parametrize("unused", [0, MIB, 5 * MIB, 2 * GIB, 4 * GIB, 7 * GIB, 100 * GIB])
@pytest.mark.parametrize("intermediate_size", [10_000, 10_000_000])
def test_memory_that_is_unused_makes_the_block_smaller_as_transformers_does(
    unused: int, intermediate_size: int
) -> None:
    config = config_of("llama", num_hidden_layers=1, intermediate_size=intermediate_size)
    model = loading.meta_model(loading.model_class(config), config)
    placed = dict.fromkeys((name for name, _ in model.named_parameters()), torch.device("cuda", 0))
    asked: list[int] = []

    def empty(elements: int, **_: object) -> None:
        asked.append(elements)

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(200 * GIB, 200 * GIB)),
        mock.patch.object(torch.cuda, "memory_reserved", return_value=unused),
        mock.patch.object(torch.cuda, "memory_allocated", return_value=0),
        mock.patch.object(loading, "unused_bytes", return_value=unused),
    ):
        modeling_utils.caching_allocator_warmup(model, placed, None)
        loading._warm_up_allocator(model, torch.device("cuda", 0))

    assert asked[0] == asked[1]
