"""Reads the catalogue of GPUs, and finds a GPU by name or memory size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, TypeGuard

import yaml

from autotune.core.gpu import ALL_GPUS, AchievedRates, Gpu, GpuSpeeds
from autotune.core.machine import Hardware
from autotune.errors import InputError
from autotune.units import GIB, MIB, format_bytes, parse_size

# For GPUs without a reported value. Before Hopper, reports are between 0.13 (T4) and 0.49 GiB (A100).
UNMEASURED_CONTEXT_BYTES = GIB // 2


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return every GPU of the catalogue."""
    return tuple(_gpu(row) for row in _read("gpus.yaml"))


def find_gpu(word: str | int) -> Gpu:
    """Return a GPU by its name, such as ``H100-80GB``, or by its memory, such as ``24GiB`` or a number of bytes.

    Case, spaces, punctuation and a leading manufacturer's name are ignored. The speeds of a GPU given by its memory
    are unknown.

    Raises:
        InputError: it is neither a name in the catalogue nor a size.
    """
    if isinstance(word, int):
        return _gpu_of_size(format_bytes(parse_size(word)), word)
    names = _gpus_by_name()
    gpu = names.get(_normalized(word))
    if gpu is not None:
        return gpu
    # A number without a unit is more often a part of a name, such as 4090, than bytes.
    if word.strip()[-1:].isalpha():
        with suppress(InputError):
            return _gpu_of_size(word.strip(), parse_size(word))
    # The variant of a name may be missing, so names that begin with the word come first, then similar ones.
    plain = _normalized(word)
    near = [name for name in names if plain and name.startswith(plain)] or get_close_matches(plain, names, n=3)
    close = dict.fromkeys(names[match].name for match in near)
    known = f"Closest: {', '.join(close)}." if close else f"There are {', '.join(gpu.name for gpu in gpus())}."
    raise InputError(f"{word!r} is not a known GPU.", hint=f"{known} A size such as 24GiB works too.")


def listed_gpu(name: str) -> Gpu | None:
    """Return the GPU of the catalogue with a name, normalised as in :func:`find_gpu`, or None."""
    return _gpus_by_name().get(_normalized(name))


def compares_gpus(gpu: str | int | None) -> TypeGuard[str]:
    """Return whether a ``--gpu`` names several GPUs, to be compared in a table."""
    return isinstance(gpu, str) and (gpu == ALL_GPUS or "," in gpu)


def compared_gpus(words: Sequence[str]) -> Sequence[str]:
    """Return the catalogue's name of each of these GPUs once; of all of them for the word ``all``.

    Raises:
        InputError: one is not a known GPU, or there is none.
    """
    if not words:
        raise InputError("--gpu names no GPU.", hint="Write for instance --gpu H100-80GB,A100-80GB.")
    found = gpus() if ALL_GPUS in words else map(find_gpu, words)
    return list(dict.fromkeys(gpu.name for gpu in found))


def present_gpu(hardware: Hardware) -> Gpu:
    """Return a GPU of this machine: its memory from the driver, its speeds from the catalogue if listed there."""
    listed = _gpus_by_name().get(_normalized(hardware.name))
    gpu = listed or Gpu(hardware.name, hardware.memory_bytes, "usable", "", UNMEASURED_CONTEXT_BYTES)
    return replace(
        gpu,
        memory_bytes=hardware.memory_bytes,
        memory_kind="usable",
        memory_source="",
        compute_capability=hardware.compute_capability,
    )


def _gpu_of_size(name: str, memory_bytes: int) -> Gpu:
    if memory_bytes < MIB:
        raise InputError(f"A GPU with {memory_bytes} bytes is not possible.", hint="Write for instance 24GiB.")
    return Gpu(name, memory_bytes, "given", "", UNMEASURED_CONTEXT_BYTES)


@cache
def _gpus_by_name() -> Mapping[str, Gpu]:
    return {_normalized(name): gpu for gpu in gpus() for name in (gpu.name, *gpu.aliases)}


def _normalized(name: str) -> str:
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
    """Return the speeds of a GPU's row in operations and bytes per second, with its achieved rates."""
    units = dict.fromkeys(("bandwidth", "pcie", "nvlink"), 1e9) | dict.fromkeys(("fp32", "fp16", "bf16", "tf32"), 1e12)
    figures = {key: value and value * units.get(key, 1) for key, value in row.items()}
    return GpuSpeeds(**figures, achieved=_achieved(name))


def _achieved(name: str) -> AchievedRates:
    """Return the achieved rates of a GPU: its own figures, and common ones for the rest."""
    rates = _read("achieved.yaml")
    own: Mapping[str, Any] = next((card for card in rates["cards"] if name in card["names"]), {})
    figures = {**rates["common"], **own}
    figures.pop("names", None)
    for key in ("links", "attention_kernels"):
        figures[key] = tuple(sorted(figures[key].items()))
    return AchievedRates(**figures)


@cache
def _read(name: str) -> Any:
    return yaml.safe_load(files("autotune.inspection").joinpath(name).read_text(encoding="utf-8"))
