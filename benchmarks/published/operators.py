"""Fits achieved rates to published measurements of single operators.

``python -m benchmarks.published.operators AICONFIGURATOR NEUSIGHT GPU_BENCHES`` takes clones of
ai-dynamo/aiconfigurator, sitar-lab/NeuSight and te42kyfo/gpu-benches and prints tables of Markdown, which
``operators.md`` has.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]  # its stubs are a package of their own

_SYSTEMS = "aic-core/src/aiconfigurator_core/systems/data"
_DATASET = "scripts/asplos/data/dataset/test"
# Peaks of the data sheets: of 16-bit products, and bytes per second.
_HALF = {
    "a100_sxm": 312e12, "h100_sxm": 989.4e12, "h200_sxm": 989.4e12, "b200_sxm": 2250e12, "l40s": 362e12,
}  # fmt: skip
_SINGLE = {
    "A100_80GB_PCIe": (19.5e12, 1.935e12), "H100_80GB": (66.9e12, 3.35e12), "L4": (30.3e12, 0.3e12),
    "T4": (8.1e12, 0.32e12), "V100-PCIE-32GB": (14e12, 0.9e12),
}  # fmt: skip
_TENSORS = {"add": 3, "mul": 3, "div": 3, "gelu": 2, "relu": 2, "tanh": 2, "ln": 2, "softmax": 2}
_LEAST = 512
_LARGE_BYTES = 2e8
_WIDTHS = (1024, 2048, 4096, 8192, 12288, 16384)
# TFLOPS of PyTorch's attention without a mask, both passes, by width of heads and tokens of a row, in the figures of
# https://github.com/Dao-AILab/flash-attention (assets/flash2_*_fwd_bwd_benchmark.png); bytes per second, and the shares
# of softmax and of copies that the catalogue has.
_TOKENS = (512, 1024, 2048, 4096, 8192)
_ATTENTION = {
    ("A100", 64): (36, 40, 43, 45, 46), ("A100", 128): (53, 67, 76, 79, 86),
    ("H100", 64): (62, 72, 81, 86, 87), ("H100", 128): (93, 120, 145, 160, 167),
}  # fmt: skip
_BANDWIDTH = {"A100": 2.039e12, "H100": 3.35e12}
_SOFTMAX, _STRIDED = 0.71, 0.45
# MiB of the L2 caches, by their data sheets.
_CACHES = {"a40": 6, "a100_80": 40, "l40": 96, "h200": 50}
_BYTES_OF_PAIR = 16


def line(flops: Any, seconds: Any, peak: float) -> tuple[float, float, float]:
    """Return share, fixed seconds and median relative error of ``flops / (peak * share) + fixed``.

    Absolute relative errors are minimised, by least squares with weights that are computed anew.
    """
    columns = np.stack([flops / peak, np.ones_like(flops)], axis=1)
    weights = 1 / seconds
    for _ in range(30):
        (inverse, fixed), *_ = np.linalg.lstsq(columns * weights[:, None], seconds * weights, rcond=None)
        errors = np.abs(columns @ np.array([inverse, fixed]) - seconds) / seconds
        weights = 1 / seconds / np.sqrt(np.maximum(errors, 1e-3))
    return 1 / inverse, fixed, float(np.median(errors))


def halves(clone: Path) -> Iterator[str]:
    """Yield a row for each GPU of aiconfigurator: medians over the frameworks that it has figures of."""
    for card, peak in _HALF.items():
        found = []
        for file in sorted((clone / _SYSTEMS / card / "gemm").rglob("gemm_perf.parquet")):
            data = pd.read_parquet(file)
            data = data[data.gemm_dtype.isin(["bfloat16", "float16"])]
            data = data[(data.m >= _LEAST) & (data.n >= _LEAST) & (data.k >= _LEAST)]
            flops = (2.0 * data.m * data.n * data.k).to_numpy()
            found.append((len(data), *line(flops, data.latency.to_numpy() * 1e-3, peak)))
        count, share, fixed, error = np.median(np.array(found), axis=0)
        yield f"| {card} | 16 bit | {len(found)} x {count:.0f} | {share:.2f} | {fixed * 1e6:.1f} | {error:.1%} |"


def singles(clone: Path) -> Iterator[str]:
    """Yield a row for each GPU of NeuSight: products of float32 matrices, PyTorch's dispatch included."""
    data = pd.read_csv(clone / _DATASET / "linear.csv")
    for card, (peak, _) in _SINGLE.items():
        own = data[data.Device.str.replace(" ", "_").str.contains(card)]
        flops = (2.0 * own.B * own.M * own.N * own.K).to_numpy()
        share, fixed, error = line(flops, own.Latency.to_numpy() * 1e-3, peak)
        yield f"| {card} | float32 | {len(own)} | {share:.2f} | {fixed * 1e6:.1f} | {error:.1%} |"


def passes(clone: Path) -> Iterator[str]:
    """Yield a row for each GPU and operator that memory bounds: its share of the bandwidth, on large tensors."""
    data = pd.concat([pd.read_csv(clone / _DATASET / f"{name}.csv") for name in ("elem", "ln", "softmax")])
    for card, (_, bandwidth) in _SINGLE.items():
        for operator, tensors in _TENSORS.items():
            chosen = data.Device.str.replace(" ", "_").str.contains(card) & (data.OPName == operator)
            own = data[chosen]
            moved = 4.0 * tensors * own.B * own.H
            large = moved > _LARGE_BYTES
            if large.any():
                shares = (moved / (own.Latency * 1e-3) / bandwidth)[large]
                low, middle, high = np.percentile(shares, [10, 50, 90])
                yield f"| {card} | {operator} | {large.sum()} | {middle:.2f} | {low:.2f} to {high:.2f} |"


def widths(clone: Path) -> Iterator[str]:
    """Yield a row for each GPU of NeuSight: the share of the bandwidth that softmax reaches, by width of its rows."""
    data = pd.read_csv(clone / _DATASET / "softmax.csv")
    data["share"] = 8.0 * data.B * data.H / (data.Latency * 1e-3)
    for card, (_, bandwidth) in _SINGLE.items():
        own = data[data.Device.str.replace(" ", "_").str.contains(card) & (8.0 * data.B * data.H > _LARGE_BYTES)]
        if len(own):
            shares = (own.share[own["H"] == width].median() / bandwidth for width in _WIDTHS)
            yield f"| {card} | " + " | ".join(f"{share:.2f}" for share in shares) + " |"


def batched() -> Iterator[str]:
    """Yield a row for each GPU: the share of the bandwidth that is left for the products of PyTorch's attention.

    16,384 tokens and 2,048 features, of 2 bytes. Products pass six times over the squares of scores and twelve times
    over the features, softmax five times over the scores, and eight copies read and write the features.
    """
    for (card, heads), speeds in _ATTENTION.items():
        shares = []
        for tokens, tflops in zip(_TOKENS, speeds, strict=True):
            scores = 16384 * tokens * 2048 // heads
            features = 16384 * 2048
            softmax = 5 * 2 * scores / (_BANDWIDTH[card] * _SOFTMAX)
            copies = 8 * 2 * 2 * features / (_BANDWIDTH[card] * _STRIDED)
            seconds = 3.5 * 4 * heads * scores / (tflops * 1e12) - softmax - copies
            shares.append((6 * 2 * scores + 12 * 2 * features) / seconds / _BANDWIDTH[card])
        yield f"| {card} | {heads} | " + " | ".join(f"{share:.2f}" for share in shares) + " |"


def caches(clone: Path) -> Iterator[str]:
    """Yield a row for each GPU of gpu-benches: fixed time of a pass, rate in the L2 cache, and how much of it holds.

    One kernel passes again and again over the same numbers, half of which it reads and half of which it writes,
    launched by a graph. The cache is taken to hold what passes at nine tenths of the highest rate.
    """
    for card, size in _CACHES.items():
        lines = (clone / "gpu-small-kernels" / f"{card}_graph.txt").read_text(encoding="utf-8").splitlines()
        found = [(int(count), max(map(float, rates))) for count, _, *rates in map(str.split, lines) if rates]
        moved, rates = np.array([(count * _BYTES_OF_PAIR, rate * 1e9) for count, rate in found if rate]).T
        held = moved[rates >= 0.9 * rates.max()].max()
        inside = (moved > 1e6) & (moved <= held)
        rate, fixed, error = line(moved[inside], moved[inside] / rates[inside], 1.0)
        share = held / (size * 2**20)
        yield f"| {card} | {fixed * 1e6:.1f} | {rate / 1e9:,.0f} | {held / 1e6:.1f} | {share:.2f} | {error:.1%} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("aiconfigurator", type=Path)
    parser.add_argument("neusight", type=Path)
    parser.add_argument("gpu_benches", type=Path)
    clones = parser.parse_args()
    print("| GPU | type | products | share of peak | fixed, µs | median error |\n|---|---|--:|--:|--:|--:|")
    print(*halves(clones.aiconfigurator), *singles(clones.neusight), sep="\n")
    print("\n| GPU | operator | tensors | share of bandwidth | 10 % to 90 % |\n|---|---|--:|--:|--:|")
    print(*passes(clones.neusight), sep="\n")
    print("\n| GPU | " + " | ".join(f"{width:,}" for width in _WIDTHS) + " |\n|---|" + "--:|" * len(_WIDTHS))
    print(*widths(clones.neusight), sep="\n")
    print("\n| GPU | heads | " + " | ".join(f"{tokens:,}" for tokens in _TOKENS) + " |\n|---|" + "--:|" * 6)
    print(*batched(), sep="\n")
    print("\n| GPU | fixed, µs | GB/s | MB held | of L2 | median error |\n|---|--:|--:|--:|--:|--:|")
    print(*caches(clones.gpu_benches), sep="\n")


if __name__ == "__main__":
    main()
