"""How measurements correct estimates."""

from __future__ import annotations

import random

import pytest

from autotune.planning.predictor import ENOUGH, SMALLEST_ERROR, Correction, Pair, correction

MIB = 2**20
STATED = 0.10


def pairs(*measured_by_predicted: Pair) -> list[Pair]:
    return [*measured_by_predicted]


def test_one_probe_corrects_nothing() -> None:
    assert correction(pairs((100, 200)), STATED) == Correction(error=STATED)


def test_what_is_missing_everywhere_is_added() -> None:
    found = correction(pairs(*((size * MIB, (size + 120) * MIB) for size in (200, 900, 4000))), STATED)
    assert (found.factor, found.offset, found.probes) == (1.0, 120 * MIB, 3)
    assert found(1000 * MIB) == 1120 * MIB


def test_what_is_a_share_everywhere_is_multiplied() -> None:
    found = correction(pairs(*((size * MIB, size * 1.25 * MIB) for size in (200, 900, 4000))), STATED)
    assert (found.factor, found.offset) == (1.25, 0.0)


def test_one_probe_that_was_disturbed_moves_nothing() -> None:
    steady = [(size, size + 10.0) for size in (100.0, 200.0, 300.0, 400.0)]
    assert correction(pairs(*steady, (250.0, 900.0)), STATED)(1000) == pytest.approx(1010)
    assert correction(pairs((1, 2), (30, 60), (500, 1000), (70, 5000)), STATED).factor == 2.0


def test_the_stated_error_covers_every_probe_seen() -> None:
    chance = random.Random(0)
    seen = pairs(*((size, size * chance.uniform(0.7, 1.4)) for size in range(100, 1000, 50)))
    found = correction(seen, STATED)
    assert found.error > STATED
    assert all(abs(measured / found(predicted) - 1) <= found.error for predicted, measured in seen)


def test_a_smaller_error_than_before_takes_several_probes_and_has_a_floor() -> None:
    exact = [(float(size), size + 7.0) for size in range(100, 100 + 50 * ENOUGH, 50)]
    assert correction(pairs(*exact[:2]), STATED).error == STATED
    assert correction(pairs(*exact[: ENOUGH - 1]), STATED).error == STATED
    assert correction(pairs(*exact), STATED).error == SMALLEST_ERROR


def test_a_correction_never_predicts_less_than_nothing() -> None:
    found = correction(pairs((1000, 400), (900, 300)), STATED)
    assert found(100) >= 0
