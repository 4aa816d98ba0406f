"""Records a script process's peak memory of each optimizer step, and ends the process after some steps."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import optimizer
from torch.utils.data import dataloader

from . import completions, longest, places

# A rank must not end while another still reads its messages: that rank would fail.
_MAX_SECONDS_FOR_OTHER_RANKS = 120.0
_POLL_SECONDS = 0.05
_REASON_CHARACTERS = 600


class ProcessRecorder:
    """Records one process through hooks of PyTorch.

    Attributes:
        record: content of ``process-PID.json``: the fields of ``ProcessRecord`` in
            ``autotune/core/documents/dry_run.py``.
    """

    def __init__(self, folder: Path, request: dict[str, Any]) -> None:
        self._folder = folder
        self._steps: int = request["steps"]
        self._as_shuffled: bool = request["as_shuffled"]
        self._reset_peaks: Callable[[int], Any] | None = None
        self._reset_record()

    def _reset_record(self) -> None:
        """Start an empty record; also runs in forked children."""
        self._steps_by_optimizer: dict[int, int] = {}
        self._step_depth: dict[int, int] = {}
        self._peaks: dict[int, tuple[int, int]] = {}
        self._has_iterated = False
        self._engine_steps = False
        self.record: dict[str, Any] = {
            "pid": os.getpid(),
            "rank": 0,
            "local_ranks": 1,
            "uses_cuda": False,
            "ended": "",
            "steps": 0,
            "spans": [],
            "loaders": [],
            "failed_allocations": [],
            "error": None,
        }

    def follow(self) -> None:
        """Register the hooks with PyTorch and the interpreter."""
        optimizer.register_optimizer_step_pre_hook(self._before_step)
        optimizer.register_optimizer_step_post_hook(self._after_step)
        torch.cuda._lazy_call(self._on_cuda_start)
        for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
            self._wrap_reset(name)
        # Subclasses of DataLoader override __iter__ (torchdata's StatefulDataLoader), but make iterators of this class.
        start_iterator = dataloader._BaseDataLoaderIter.__init__

        def started(iterator: Any, loader: Any) -> None:
            self._on_iteration(loader)
            start_iterator(iterator, loader)

        dataloader._BaseDataLoaderIter.__init__ = started
        atexit.register(self._on_exit)
        os.register_at_fork(after_in_child=self._reset_record)

    def _on_cuda_start(self) -> None:
        self.record["uses_cuda"] = True
        # CUDA's own allocator (cudaMallocAsync) has no observers.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_attach_out_of_memory_observer(self._on_out_of_memory)
        self._write()

    def _wrap_reset(self, name: str) -> None:
        """Record peaks before the script resets them."""
        original = getattr(torch._C, name, None)
        if original is None:
            return

        def reset(device: int) -> Any:
            self._record_peaks()
            return original(device)

        setattr(torch._C, name, reset)
        self._reset_peaks = self._reset_peaks or original

    def _record_peaks(self) -> None:
        for device in range(torch.cuda.device_count()):
            reserved = torch.cuda.max_memory_reserved(device)
            if reserved:
                previous = self._peaks.get(device, (0, 0))
                self._peaks[device] = (
                    max(previous[0], torch.cuda.max_memory_allocated(device)),
                    max(previous[1], reserved),
                )

    def _on_iteration(self, loader: Any) -> None:
        entry = {"order": "as shuffled", "reason": "", "field": "", "unit": "", "rows": 0, "largest": 0}
        if not self._as_shuffled:
            try:
                row_sizes = longest.put_largest_first(loader)
                entry |= {"order": "largest first", "field": row_sizes.field, "unit": row_sizes.unit}
                entry |= {"rows": len(row_sizes.rows), "largest": max(row_sizes.rows, default=0)}
                if row_sizes.unmeasured:
                    # The largest batch may be one with images, whose sizes are unknown.
                    entry |= {"order": "as it is", "reason": "its rows have images or sounds, whose sizes are not read"}
            except longest.UnorderedError as error:
                entry |= {"order": "as it is", "reason": str(error)}
            except Exception as error:  # noqa: BLE001 - a dataset of the script may raise anything; the script goes on
                text = f"{type(error).__name__}: {_message(error)}"
                entry |= {"order": "as it is", "reason": f"measuring its rows fails ({text})"}
        if entry not in self.record["loaders"]:
            self.record["loaders"].append(entry)
        if not self._has_iterated:
            self._has_iterated = True
            self._wrap_engine_step()
            completions.stagger_completions()
            self._close_span(0)

    def _wrap_engine_step(self) -> None:
        """Count steps of DeepSpeed's engine, which calls PyTorch's optimizer once for each sub-group of parameters."""
        engine = sys.modules.get("deepspeed.runtime.engine")
        if engine is None:
            return
        take = engine.DeepSpeedEngine._take_model_step

        def taken(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self._engine_steps = True
            result = take(engine, *args, **kwargs)
            self._count_step(engine)
            return result

        engine.DeepSpeedEngine._take_model_step = taken

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._step_depth[id(optimizer)] = self._step_depth.get(id(optimizer), 0) + 1

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # A subclass's step may call that of its base class, for which PyTorch runs the hooks too.
        self._step_depth[id(optimizer)] = self._step_depth.get(id(optimizer), 1) - 1
        if not self._step_depth[id(optimizer)] and not self._engine_steps:
            self._count_step(optimizer)

    def _count_step(self, optimizer: Any) -> None:
        self._steps_by_optimizer[id(optimizer)] = self._steps_by_optimizer.get(id(optimizer), 0) + 1
        if self._steps_by_optimizer[id(optimizer)] <= self.record["steps"]:
            return
        self.record["steps"] += 1
        self._close_span(self.record["steps"])
        if self.record["steps"] == self._steps:
            self._stop()

    def _close_span(self, step: int) -> None:
        """Record the peaks since the previous span; step 0 is the time before the first batch."""
        if not torch.cuda.is_initialized():
            return
        self._record_peaks()
        for device, (allocated, reserved) in sorted(self._peaks.items()):
            free, total = torch.cuda.mem_get_info(device)
            # Memory outside this process's allocator is read now, and taken to be the same at the peak.
            other_bytes = total - free - torch.cuda.memory_reserved(device)
            span = {"step": step, "device": device, "card": str(torch.cuda.get_device_properties(device).uuid)}
            span |= {"allocated_bytes": allocated, "reserved_bytes": reserved}
            span |= {"non_pytorch_bytes": other_bytes, "total_bytes": total}
            self.record["spans"].append(span)
            if self._reset_peaks is not None:
                self._reset_peaks(device)
        self._peaks.clear()
        self._write()

    def _on_out_of_memory(self, device: int, requested: int, allowed: int, free: int) -> None:
        # The post hook of a step that this error ends never runs.
        self._step_depth.clear()
        with contextlib.suppress(Exception):
            self.record["failed_allocations"].append(
                {
                    "step": self.record["steps"] + int(self._has_iterated),
                    "device": device,
                    "requested_bytes": requested,
                    "allocated_bytes": torch.cuda.memory_allocated(device),
                    "reserved_bytes": torch.cuda.memory_reserved(device),
                    "free_bytes": free,
                    "place": places.here(),
                }
            )
            self._write()

    def _on_exception(self, error: BaseException) -> None:
        place = places.of_traceback(error.__traceback__)
        chain = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
            chain.append(cause)
        memory = any("out of memory" in str(each).lower() for each in chain)
        told = {"kind": type(error).__name__, "message": _message(error), "out_of_memory": memory, "place": place}
        self.record |= {"ended": "error", "error": told}
        with contextlib.suppress(Exception):
            self._close_span(self.record["steps"] + int(self._has_iterated))
        self._write()

    def _on_exit(self) -> None:
        # Python keeps the exception that ends a program here; scripts and libraries replace sys.excepthook.
        error = getattr(sys, "last_value", None)
        if error is not None:
            self._on_exception(error)
        elif not self.record["ended"]:
            self.record["ended"] = "finished"
            with contextlib.suppress(Exception):
                self._close_span(self.record["steps"] + int(self._has_iterated))
            self._write()

    def _stop(self) -> None:
        """End the process with code 0 once all ranks of this machine are done."""
        self.record["ended"] = "stopped"
        self._write()
        (self._folder / f"stopped-{self.record['rank']}").touch()
        until = time.monotonic() + _MAX_SECONDS_FOR_OTHER_RANKS
        while len(list(self._folder.glob("stopped-*"))) < self.record["local_ranks"]:
            if time.monotonic() > until:
                break
            time.sleep(_POLL_SECONDS)
        else:
            (self._folder / "all-stopped").touch()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        logging.shutdown()
        # Skips the rest of the script, such as saving and uploading, and its exit handlers.
        os._exit(0)

    def _write(self) -> None:
        self.record |= _ranks()
        if not self.record["uses_cuda"] and self.record["error"] is None:
            return
        file = self._folder / f"process-{self.record['pid']}.json"
        part = file.with_suffix(".part")
        with contextlib.suppress(OSError):
            part.write_text(json.dumps(self.record), encoding="utf-8")
            part.replace(file)


def _message(error: BaseException) -> str:
    """Return the text of an error; of one that quotes the traceback of another process, the last line of that."""
    text = str(error)
    lines = text.strip().splitlines() if "Traceback (most recent call last):" in text else [text]
    last = lines[-1].removeprefix(f"{type(error).__name__}: ")
    return " ".join(last.split())[:_REASON_CHARACTERS]


def _ranks() -> dict[str, int]:
    """Return this process's rank and the number of ranks on this machine, from PyTorch or the launcher's variables."""
    variables = {name: int(os.environ.get(name) or 0) for name in ("RANK", "LOCAL_WORLD_SIZE")}
    rank, local = variables["RANK"], variables["LOCAL_WORLD_SIZE"]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, local = torch.distributed.get_rank(), local or torch.distributed.get_world_size()
    return {"rank": rank, "local_ranks": local or 1}
