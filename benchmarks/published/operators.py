"""Fits achieved rates to single operators that others measured.

``python -m benchmarks.published.operators AICONFIGURATOR NEUSIGHT`` takes clones of ai-dynamo/aiconfigurator and
sitar-lab/NeuSight and prints a table of Markdown, which ``operators.md`` has.
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


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("aiconfigurator", type=Path)
    parser.add_argument("neusight", type=Path)
    clones = parser.parse_args()
    print("| GPU | type | products | share of peak | fixed, µs | median error |\n|---|---|--:|--:|--:|--:|")
    print(*halves(clones.aiconfigurator), *singles(clones.neusight), sep="\n")
    print("\n| GPU | operator | tensors | share of bandwidth | 10 % to 90 % |\n|---|---|--:|--:|--:|")
    print(*passes(clones.neusight), sep="\n")


if __name__ == "__main__":
    main()
