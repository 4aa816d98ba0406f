"""How few layers stand for all, and how figures at known shapes make figures at others."""

from __future__ import annotations

import pytest

from autotune.core.batch_geometry import Shape
from autotune.planning.extrapolation.alignment import from_end, from_start
from autotune.planning.extrapolation.depth import traced_depths
from autotune.planning.extrapolation.shape import Anchors, Basis, layer_weights, shape_weights


@pytest.mark.parametrize(
    ("kinds", "every", "depths"),
    [
        (["full"] * 32, 1, (2, 3)),
        (["full"] * 2, 1, (2,)),
        (["full"] * 32, 2, (2, 4)),
        (["full"] * 31, 2, (3, 5)),
        (["sliding", "full"] * 13, 1, (2, 4)),
        (["dense", *["moe"] * 26], 1, (2, 3)),
        (["dense"] * 3 + ["moe"] * 58, 1, (4, 5)),
        ((["sliding"] * 5 + ["full"]) * 5 + ["sliding"] * 2, 1, (8, 14)),
        (["a", "b", "c"], 1, (3,)),
    ],
)
def test_traced_depths_end_as_the_model_does(kinds: list[str], every: int, depths: tuple[int, ...]) -> None:
    assert traced_depths(kinds, every) == depths


def test_where_weights_are_gathered_ahead_there_are_two_layers_at_either_end() -> None:
    assert traced_depths(["full"] * 32, edges=True) == (4, 5)
    assert traced_depths(["full"] * 32, 2, edges=True) == (8, 10)
    assert traced_depths(["full"] * 5, edges=True) == (5,)


def test_what_is_affine_in_layers_follows_from_two_depths() -> None:
    short, long = layer_weights((2, 4), 24)
    assert short * (7 + 3 * 2) + long * (7 + 3 * 4) == pytest.approx(7 + 3 * 24)


def test_a_single_depth_says_nothing_of_another() -> None:
    assert layer_weights((2,), 2) == (1.0,)
    with pytest.raises(ValueError, match="24 layers do not follow from 2"):
        layer_weights((2,), 24)


@pytest.mark.parametrize("basis", Basis)
def test_a_sum_of_the_basis_terms_follows_from_as_many_shapes_as_it_has_terms(basis: Basis) -> None:
    sizes = (1, 256, 256), (4, 256, 256), (4, 1024, 1024), (1, 256, 192), (1, 256, 400)
    known = [Shape(rows, tokens, tokens // 4, beside) for rows, tokens, beside in sizes][: basis.size]
    factors = (5.0, 3.0, 0.25, 2.0, 0.125)

    def figure(shape: Shape) -> float:
        return sum(factor * term for factor, term in zip(factors, basis.terms(shape), strict=False))

    wanted = Shape(7, 256 if basis is Basis.ROWS else 777.5, beside=810.5)
    weights = shape_weights(basis, known, wanted)
    assert sum(w * figure(shape) for w, shape in zip(weights, known, strict=True)) == pytest.approx(figure(wanted))


def test_equal_shapes_determine_nothing() -> None:
    with pytest.raises(ValueError, match="do not determine"):
        shape_weights(Basis.ROWS, [Shape(2, 64), Shape(2, 64)], Shape(4, 64))


LAYER = [f"layer {i}" for i in range(15)]
HEAD = LAYER[:3] + [f"head {i}" for i in range(6)]
BACK = [f"back {i}" for i in range(17)]


def model(layers: int) -> list[str]:
    return ["embedding", *LAYER * layers, *HEAD, *BACK * layers, "embedding back"]


def test_a_deeper_model_is_the_shallow_one_with_layers_inserted_in_both_passes() -> None:
    short, long = model(2), model(3)
    start, end = from_start(short, long), from_end(short, long)
    assert start is not None
    assert end is not None
    assert [long[index] for index in start] == [long[index] for index in end] == short
    # Counted from the end, the last layer's forward is that of the deeper model's last layer; from the start, not.
    assert end[1 + len(LAYER)] - start[1 + len(LAYER)] == len(LAYER)


def test_a_model_that_does_something_else_is_not_aligned() -> None:
    other = [name.replace("head 4", "another head") for name in model(3)]
    assert from_start(model(2), other) is None


def test_beyond_a_whole_chunk_figures_go_on_in_another_line() -> None:
    anchors = Anchors(Basis.ROWS, (Shape(1, 100), Shape(4, 100)), 400.0, Shape(8, 100))

    def figure(rows: int) -> float:
        return 10.0 + 5 * min(rows, 4) + 2 * max(0, rows - 4)

    for rows in (2, 4, 6, 8, 16):
        excess = anchors.excess(Shape(rows, 100))
        followed = sum(weight * figure(shape.rows) for shape, weight in anchors.sums(Shape(rows, 100)).items())
        at_beyond = sum(weight * figure(shape.rows) for shape, weight in anchors.sums(Shape(8, 100)).items())
        assert followed + excess * (figure(8) - at_beyond) == pytest.approx(figure(rows))


def test_the_time_to_generate_follows_the_generated_tokens_of_a_row_and_hardly_their_number_of_rows() -> None:
    known = Shape(2, 566, 512), Shape(7, 566, 512), Shape(2, 288, 253)
    wanted = Shape(4, 291, 256)

    def seconds(shape: Shape) -> float:
        # 0.1 s for the prompt; 29 ms for a token, and 1 ns more for each token of the rows that attention reads.
        return 0.1 + shape.generated * (0.029 + 1e-9 * shape.rows * shape.tokens)

    weights = Anchors(Basis.TOKENS, known).sums(wanted, generating=True)
    assert sum(weight * seconds(shape) for shape, weight in weights.items()) == pytest.approx(seconds(wanted))


def test_where_all_rows_generate_as_many_tokens_their_time_follows_the_sizes() -> None:
    known = Shape(2, 566, 512), Shape(7, 566, 512), Shape(2, 544, 512)
    found = Anchors(Basis.TOKENS, known)
    assert found.sums(Shape(4, 560, 512), generating=True) == found.sums(Shape(4, 560, 512))
