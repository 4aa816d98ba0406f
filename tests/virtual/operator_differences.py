"""Operators and optimizers whose traces differ from PyTorch's allocators; without torch, for processes that lack it."""

from __future__ import annotations

from collections.abc import Mapping

_TOLERANCE = 0.005
REFUSED = frozenset({
    "allclose", "combinations", "cov", "ctc_loss", "index_fill", "masked_select", "nonzero", "nonzero_static",
    "tensor_split", "unique", "unique_consecutive",
})  # fmt: skip
"""Steps that a trace refuses: nearly always because a shape depends on data."""
REFUSED_ON_CUDA = REFUSED | {
    "fractional_max_pool3d", "jiterator_2inputs_2outputs", "jiterator_4inputs_with_extra_args", "jiterator_binary",
    "jiterator_binary_return_by_ref", "jiterator_unary",
}  # fmt: skip
DIFFERENT_ON_CPU = frozenset({
    "LBFGS, default, strong_wolfe", "Muon, default, Tensor lr", "Muon, default, default",
    "Muon, default, non-default lr", "Muon, default, non-default momentum", "Muon, default, non-default weight_decay",
    "Muon, default, passing alternative ns_coefficients", "Muon, default, passing alternative ns_steps",
    "_batch_norm_with_update", "_chunk_cat", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "argsort",
    "cholesky", "clamp", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "cumprod", "embedding_bag", "geqrf", "histc", "kthvalue", "lu", "lu_unpack", "masked_fill", "masked_scatter",
    "matrix_exp", "max.reduction_no_dim", "min.reduction_no_dim", "multinomial", "native_group_norm", "one_hot",
    "ormqr", "pca_lowrank", "pinverse", "prod", "scatter_reduce.amax", "scatter_reduce.amin", "sgn", "std_mean",
    "std_mean.unbiased", "svd_lowrank", "take", "trace", "var_mean", "var_mean.unbiased",
})  # fmt: skip
"""Steps of which a trace for the CPU has another peak."""
DIFFERENT_ON_CUDA = frozenset({
    "LBFGS, default, Tensor lr", "LBFGS, default, default", "LBFGS, default, non-default lr",
    "LBFGS, default, strong_wolfe", "LBFGS, default, tolerance_grad", "_chunk_cat", "_segment_reduce.offsets",
    "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "argsort", "binary_cross_entropy", "clamp",
    "conv_transpose2d", "conv_transpose3d", "cumprod", "embedding_bag", "gradient", "group_norm", "isin",
    "logcumsumexp", "lu_unpack", "masked_fill", "max.reduction_no_dim", "min.reduction_no_dim", "msort", "multinomial",
    "native_group_norm", "prod", "renorm", "scatter_reduce.amax", "scatter_reduce.amin", "sgn", "sort", "std_mean",
    "std_mean.unbiased", "take", "to", "trace", "var_mean", "var_mean.unbiased",
})  # fmt: skip
"""The same for CUDA. ``to``: a copy to the host that does not block converts its type on the device first."""


def differing(found: Mapping[str, int | str], real: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the peaks of a trace and of PyTorch's allocator where they differ by more than 0.5 %."""
    both = ((name, found[name], peak) for name, peak in real.items())
    return {
        name: (own, peak)
        for name, own, peak in both
        if isinstance(own, int) and abs(own - peak) > _TOLERANCE * max(own, peak)
    }
