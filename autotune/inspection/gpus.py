"""The catalogue of GPUs to plan for, and the lookup of a GPU by name or size."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from autotune.core.gpu import AchievedRates, Gpu, GpuSpeeds
from autotune.core.machine import Hardware
from autotune.errors import InputError
from autotune.units import GIB, MIB, format_bytes, parse_size

# For GPUs without a report of it. Before Hopper, reported values are between 0.13 (T4) and 0.49 GiB (A100).
UNMEASURED_CONTEXT_BYTES = GIB // 2


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return every GPU of the catalogue."""
    return tuple(_gpu(row) for row in _read("gpus.yaml"))


def find_gpu(word: str | int) -> Gpu:
    """Return the GPU that a name such as ``H100-80GB``, a size such as ``24GiB`` or a number of bytes means.

    Case, spaces, punctuation and a leading manufacturer's name are ignored. A size means a GPU with that much memory
    and unknown speeds.

    Raises:
        InputError: it is neither a name in the catalogue nor a size.
    """
    if isinstance(word, int):
        return _of_size(format_bytes(word), word)
    names = _names()
    gpu = names.get(_plain(word))
    if gpu is not None:
        return gpu
    # A number alone is no size of a GPU: it is a part of a name, such as 4090, more often than bytes.
    if word.strip()[-1:].isalpha():
        with suppress(InputError):
            return _of_size(word.strip(), parse_size(word))
    # Names that begin with the word, since a variant may have been left out, or else similar ones.
    plain = _plain(word)
    near = [name for name in names if plain and name.startswith(plain)] or get_close_matches(plain, names, n=3)
    close = dict.fromkeys(names[match].name for match in near)
    known = f"Closest: {', '.join(close)}." if close else f"There are {', '.join(gpu.name for gpu in gpus())}."
    raise InputError(f"{word!r} is not a known GPU.", hint=f"{known} A size such as 24GiB works too.")


def listed_gpu(name: str) -> Gpu | None:
    """Return the GPU of the catalogue with a name, understood as by :func:`find_gpu`, or None."""
    return _names().get(_plain(name))


def described(hardware: Hardware) -> Gpu:
    """Return a present GPU: its memory from the driver, its speeds from the catalogue if it is listed there."""
    known = _names().get(_plain(hardware.name))
    gpu = known or Gpu(hardware.name, hardware.memory_bytes, "usable", "", UNMEASURED_CONTEXT_BYTES)
    return replace(
        gpu,
        memory_bytes=hardware.memory_bytes,
        memory_kind="usable",
        memory_source="",
        compute_capability=hardware.compute_capability,
    )


def _of_size(name: str, memory_bytes: int) -> Gpu:
    if memory_bytes < MIB:
        raise InputError(f"A GPU with {memory_bytes} bytes is not possible.", hint="Write for instance 24GiB.")
    return Gpu(name, memory_bytes, "given", "", UNMEASURED_CONTEXT_BYTES)


@cache
def _names() -> Mapping[str, Gpu]:
    return {_plain(name): gpu for gpu in gpus() for name in (gpu.name, *gpu.aliases)}


def _plain(name: str) -> str:
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    return plain.removeprefix("nvidia").removeprefix("amd")


def _gpu(row: Mapping[str, Any]) -> Gpu:
    memory, context, speeds = row["memory"], row.get("context"), row.get("speeds")
    capability = row.get("compute_capability")
    return Gpu(
        name=row["name"],
        memory_bytes=int(memory["gib"] * GIB),
        memory_kind=memory["kind"],
        memory_source=memory["source"],
        context_bytes=int(context["gib"] * GIB) if context else UNMEASURED_CONTEXT_BYTES,
        context_source=context["source"] if context else "",
        speeds=_speeds(row["name"], speeds) if speeds else None,
        compute_capability=(capability[0], capability[1]) if capability else None,
        aliases=tuple(row.get("aliases", ())),
        verified=row.get("verified", True),
    )


def _speeds(name: str, row: Mapping[str, Any]) -> GpuSpeeds:
    """Return the figures of a card's row in operations and bytes per second, with those that it achieves."""
    units = dict.fromkeys(("bandwidth", "pcie", "nvlink"), 1e9) | dict.fromkeys(("fp32", "fp16", "bf16", "tf32"), 1e12)
    figures = {key: value and value * units.get(key, 1) for key, value in row.items()}
    return GpuSpeeds(**figures, achieved=_achieved(name))


def _achieved(name: str) -> AchievedRates:
    """Return the rates of a card: its own figures, over what is common to all."""
    known = _read("achieved.yaml")
    own: Mapping[str, Any] = next((card for card in known["cards"] if name in card["names"]), {})
    figures = {**known["common"], **own}
    figures.pop("names", None)
    for key in ("links", "attention_kernels"):
        figures[key] = tuple(sorted(figures[key].items()))
    cache: Mapping[str, float] = figures.pop("cache")
    return AchievedRates(
        kernel_seconds=figures.pop("kernel_us") * 1e-6,
        pass_seconds=figures.pop("pass_us") * 1e-6,
        cache_bytes=cache["mb"] * 1e6,
        cache_bandwidth=cache["bandwidth"] * 1e9,
        **figures,
    )


@cache
def _read(name: str) -> Any:
    return yaml.safe_load(files("autotune.inspection").joinpath(name).read_text(encoding="utf-8"))
