"""Imports the libraries before jobs are forked, without initialising the accelerator."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import ModuleType

from autotune.core.plan import ALLOCATOR_VARIABLES

# CUDA_ERROR_NOT_INITIALIZED of cuda.h: the result of every driver call before cuInit.
_CUDA_ERROR_NOT_INITIALIZED = 3
# Queries the device's properties from the driver at import; peft imports it.
_QUERIES_CUDA = "bitsandbytes"
_PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.utils.checkpoint",
    "datasets",
    "accelerate",
    "peft",
    "transformers.models.auto.modeling_auto",
    "trl",
    "trl.models.activation_offloading",
    "autotune.step.jobs",
)
# accelerate imports DeepSpeed in every training, if it is installed: half a second per job. The first training of a
# process imports its Muon optimizer, which compiles functions; a trace would record that as a compiled step.
_DEEPSPEED = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
_TRACE_MODULES = ("autotune.virtual.engine.device", "autotune.virtual.kernels.cpu", "autotune.virtual.engine.tracing")


class _LazyImport(importlib.abc.MetaPathFinder):
    """Import hook that defers bitsandbytes, which queries CUDA's driver at import, to its first use in a forked job."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a lazily loading spec for bitsandbytes, and None for every other module."""
        if fullname != _QUERIES_CUDA:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def prepare_environment(device: str, processes: int) -> None:
    """Set the variables that the libraries read when they are imported; call it before anything imports them.

    Args:
        processes: maximum number of processes of a job, each with its own GPU.
    """
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The plan sets the allocator; without, PyTorch's default applies, not this shell's variables, which the training
    # may not have.
    for name in ALLOCATOR_VARIABLES:
        os.environ.pop(name, None)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        numbers = ",".join(map(str, range(processes)))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", numbers).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[:processes])
        # The driver's order, in which the GPUs were described; by default, CUDA begins with the fastest.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        # Otherwise torch.cuda.is_available() initialises CUDA, which does not survive a fork.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def preload(device: str) -> None:
    """Prepare this process for forking jobs: import the modules that they use, without initialising CUDA.

    On a CPU, this includes the modules of traces: the virtual accelerator, TRL's trainers, the catalogue and DeepSpeed.
    """
    # Exclude the modules from garbage collection, here and in jobs: scanning them takes an eighth of the import time,
    # and would copy their pages in a forked job.
    gc.disable()
    if device == "cuda":
        sys.meta_path.insert(0, _LazyImport())
    import_libraries()
    if device == "cpu":
        _import(_TRACE_MODULES)
        # If DeepSpeed is broken, the job that needs it reports the reason.
        with suppress(Exception):
            _import(_DEEPSPEED)
        from autotune.step.trainers import adapters
        from autotune.techniques import catalogue

        adapters()
        catalogue()
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from autotune.trainers import trainers

    trainers()
    # Compile and cache the regular expressions with which transformers matches checkpoint names.
    get_checkpoint_conversion_mapping("llama")
    gc.collect()
    gc.freeze()
    gc.enable()


def import_libraries() -> None:
    """Import all modules of jobs, so that they do not count as memory of a job."""
    _import(_PRELOADED)


def _import(names: Iterable[str]) -> None:
    for name in names:
        importlib.import_module(name)


def accelerator_is_initialized() -> bool:
    """Whether CUDA's driver has been initialised in this process, by PyTorch or directly, so that it must not fork."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_ERROR_NOT_INITIALIZED)
