"""The memory that steps of other lengths leave, scaled from one traced length, compared with their own traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache

import pytest
import torch
from torch import nn

from autotune.virtual import phase, trace
from autotune.virtual.recording.records import Place, Trace
from autotune.virtual.recording.replay import replay
from autotune.virtual.steps.phases import MICRO_BATCH
from autotune.virtual.steps.varied import MicroBatch, steps_before, varied

# The gradient of an embedding is sorted from 3,073 tokens on, in blocks that do not go with the tokens.
ROWS, TOKENS, WIDTH, VOCABULARY = 12, 256, 512, 6000


class _Network(nn.Module):
    """Attention and a feed-forward part, with what a language model's loss does at its end."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH),
                           nn.Linear(4 * WIDTH, WIDTH)]) for _ in range(layers)
        )  # fmt: skip
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embedding(ids)
        for attention, merged, up, down in self.layers:
            query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in attention(hidden).chunk(3, -1))
            scores = (query @ key.transpose(-1, -2)).softmax(-1)
            hidden = hidden + merged((scores @ value).transpose(1, 2).flatten(2))
            hidden = hidden + down(nn.functional.gelu(up(hidden)))
        logits = self.head(hidden)
        shifted = logits[:, :-1].reshape(-1, VOCABULARY)
        return nn.functional.cross_entropy(shifted, ids[:, 1:].reshape(-1)), logits


def _training(steps: Sequence[Sequence[int]], *, kept: bool) -> Callable[[torch.device], None]:
    """Return a loop of steps, given the length of each of their micro-batches.

    Args:
        kept: whether what the model returns lives into the next micro-batch.
    """

    def run(device: torch.device) -> None:
        model = _Network(layers=6).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        for number, lengths in enumerate(steps):
            with phase(str(number)):
                for tokens in lengths:
                    with phase(MICRO_BATCH):
                        ids = torch.ones(ROWS, tokens, dtype=torch.int64).to(device)
                        returned = model(ids)
                        returned[0].backward()
                        if not kept:
                            del returned
                optimizer.step()
                optimizer.zero_grad()

    return run


@cache
def _longest(*, micro_batches: int = 1, kept: bool = False) -> Trace:
    """Return the trace of four steps of the longest rows."""
    return trace(_training([[TOKENS] * micro_batches] * 4, kept=kept))


def _varied_and_real_sizes(longest: Trace, really: Trace, lengths: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the sizes of allocations from the step with these lengths on, after a comparison of the peaks."""
    scaled = varied(longest, longest.phase("3"), MicroBatch(ROWS, TOKENS), [lengths])
    expected, found = replay(really), replay(scaled)
    assert found.peak_allocated_bytes == pytest.approx(expected.peak_allocated_bytes, rel=0.001)
    assert found.peak_reserved_bytes == pytest.approx(expected.peak_reserved_bytes, rel=0.01)
    events = really.events[really.phase("3").first_event :]
    here = [event.change_bytes for event in events if event.place is Place.DEVICE]
    return [event.change_bytes for event in scaled.events][-len(here) :], here


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        pytest.param(
            tokens,
            kept,
            id=f"{tokens}-{'kept' if kept else 'freed'}",
            marks=() if (tokens, kept) in ((96, True), (255, False)) else pytest.mark.nightly,
        )
        for tokens in (96, 240, 255)
        for kept in (False, True)
    ],
)
def test_a_step_of_another_length_has_the_sizes_that_it_really_has(tokens: int, kept: bool) -> None:
    longest = _longest(kept=kept)
    really = trace(_training([[TOKENS], [TOKENS], [TOKENS], [tokens], [TOKENS]], kept=kept))

    there, here = _varied_and_real_sizes(longest, really, (tokens,))
    assert sorted(there) == pytest.approx(sorted(here), rel=0.02)


@pytest.mark.parametrize(
    "lengths",
    [(96, TOKENS), pytest.param((TOKENS, 96), marks=pytest.mark.nightly)],
    ids=["longest last", "longest first"],
)
def test_micro_batches_of_a_step_have_the_sizes_that_they_really_have(lengths: tuple[int, int]) -> None:
    longest = [TOKENS, TOKENS]
    traced = _longest(micro_batches=2)
    really = trace(_training([longest, longest, longest, lengths, longest], kept=False))

    there, here = _varied_and_real_sizes(traced, really, lengths)
    assert there == pytest.approx(here, rel=0.02)


def test_steps_of_the_same_length_leave_all_as_it_is() -> None:
    traced = trace(_training([[TOKENS]] * 3, kept=True))
    again = varied(traced, traced.phase("2"), MicroBatch(ROWS, TOKENS), [(TOKENS,)] * 5)
    after, before = replay(again), replay(traced)
    assert after.peak_allocated_bytes == before.peak_allocated_bytes
    assert after.peak_reserved_bytes == before.peak_reserved_bytes


def test_the_longest_reserves_more_after_shorter_steps_that_leave_something_in_the_cache() -> None:
    traced = trace(_training([[TOKENS]] * 3, kept=True))
    after = varied(traced, traced.phase("2"), MicroBatch(ROWS, TOKENS), steps_before(TOKENS, 1))

    assert replay(after).peak_reserved_bytes > 1.03 * replay(traced).peak_reserved_bytes
    # The need of tensors does not change.
    assert replay(after).peak_allocated_bytes == pytest.approx(replay(traced).peak_allocated_bytes, rel=0.005)


@pytest.mark.parametrize(
    ("shape", "scaled"),
    [
        ((4, 128, 768), (4, 64, 768)),
        ((4, 127, 768), (4, 63, 768)),
        ((512, 768), (256, 768)),
        ((508, 50_257), (252, 50_257)),
        ((4, 12, 128, 128), (4, 12, 64, 64)),
        ((4, 12, 128, 64), (4, 12, 64, 64)),
        ((48, 128, 128), (48, 64, 64)),
        ((4, 128, 128), (4, 64, 128)),
        ((128, 128), (64, 128)),
        ((768, 3072), (768, 3072)),
        ((), ()),
    ],
)
def test_shapes_go_with_the_length_of_rows(shape: tuple[int, ...], scaled: tuple[int, ...]) -> None:
    assert MicroBatch(4, 128).scaled(shape, 64) == scaled


@pytest.mark.parametrize("names", [("step", MICRO_BATCH), ("step",)], ids=["a micro-batch", "no micro-batch"])
def test_a_repeated_step_frees_what_the_one_before_left(names: Sequence[str]) -> None:
    def growing(device: torch.device) -> None:
        for number in range(3):
            with ExitStack() as stack:
                for name in names:
                    stack.enter_context(phase(f"{name} {number}" if name == "step" else name))
                left = torch.empty(128 * (number + 1), device=device)
        assert left.numel()

    traced = trace(growing)
    again = varied(traced, traced.phase("step 2"), MicroBatch(1, TOKENS), [(TOKENS // 2,), *[(TOKENS,)] * 5])

    assert sum(event.change_bytes for event in again.events) == 0
