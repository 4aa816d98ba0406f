"""Follows the steps of a process of the script, writes down the memory that it takes, and ends it after some."""

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
from types import TracebackType
from typing import Any

import torch
from torch.optim import optimizer

from . import completions, longest, places

# A rank that ends while another still reads what they exchanged would fail that one.
_MOST_SECONDS_FOR_OTHERS = 120.0
_GLANCE_SECONDS = 0.05
_REASON_CHARACTERS = 600


class Followed:
    """A process of the script, as far as it has come.

    Attributes:
        record: what is written; ``autotune/core/dry_run.py`` has its fields.
    """

    def __init__(self, folder: Path, request: dict[str, Any]) -> None:
        self._folder = folder
        self._steps: int = request["steps"]
        self._as_shuffled: bool = request["as_shuffled"]
        self._reset: Callable[[int], Any] | None = None
        self._begin()

    def _begin(self) -> None:
        """Start anew: in a process that was forked, too."""
        self._taken: dict[int, int] = {}
        self._depth: dict[int, int] = {}
        self._most: dict[int, tuple[int, int]] = {}
        self._began = False
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
        """Register this object's hooks with PyTorch."""
        optimizer.register_optimizer_step_pre_hook(self._enters_step)
        optimizer.register_optimizer_step_post_hook(self._leaves_step)
        torch.cuda._lazy_call(self._uses_cuda)
        for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
            self._keep_peaks(name)
        iterate = torch.utils.data.DataLoader.__iter__

        def iterated(loader: Any) -> Any:
            self._iterates(loader)
            return iterate(loader)

        torch.utils.data.DataLoader.__iter__ = iterated
        excepthook = sys.excepthook

        def excepted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._fails(error, trace)
            excepthook(kind, error, trace)

        sys.excepthook = excepted
        atexit.register(self._ends)
        os.register_at_fork(after_in_child=self._begin)

    def _uses_cuda(self) -> None:
        self.record["uses_cuda"] = True
        torch._C._cuda_attach_out_of_memory_observer(self._runs_out)
        self._write()

    def _keep_peaks(self, name: str) -> None:
        """Keep a peak that the script itself resets."""
        original = getattr(torch._C, name, None)
        if original is None:
            return

        def reset(device: int) -> Any:
            self._note_peaks()
            return original(device)

        setattr(torch._C, name, reset)
        self._reset = self._reset or original

    def _note_peaks(self) -> None:
        for device in range(torch.cuda.device_count()):
            reserved = torch.cuda.max_memory_reserved(device)
            if reserved:
                before = self._most.get(device, (0, 0))
                self._most[device] = (
                    max(before[0], torch.cuda.max_memory_allocated(device)),
                    max(before[1], reserved),
                )

    def _iterates(self, loader: Any) -> None:
        known = {"order": "as shuffled", "reason": "", "field": "", "unit": "", "rows": 0, "largest": 0}
        if not self._as_shuffled:
            try:
                found = longest.order(loader)
                known |= {"order": "largest first", "field": found.field, "unit": found.unit}
                known |= {"rows": len(found.rows), "largest": max(found.rows, default=0)}
                if found.unmeasured:
                    # The worst batch may be one of images, of which nothing is known.
                    known |= {"order": "as it is", "reason": "its rows have images or sounds, whose sizes are not read"}
            except longest.UnorderedError as error:
                known |= {"order": "as it is", "reason": str(error)}
            except Exception as error:  # noqa: BLE001 - a dataset of the script may raise anything; the script goes on
                text = " ".join(str(error).split())[:_REASON_CHARACTERS]
                known |= {"order": "as it is", "reason": f"measuring its rows fails ({type(error).__name__}: {text})"}
        if known not in self.record["loaders"]:
            self.record["loaders"].append(known)
        if not self._began:
            self._began = True
            self._count_engine_steps()
            completions.end_apart()
            self._close(0)

    def _count_engine_steps(self) -> None:
        """Count a step of DeepSpeed's engine as one; it calls PyTorch's optimizer once for each part of the weights."""
        engine = sys.modules.get("deepspeed.runtime.engine")
        if engine is None:
            return
        take = engine.DeepSpeedEngine._take_model_step

        def taken(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self._engine_steps = True
            result = take(engine, *args, **kwargs)
            self._count(engine)
            return result

        engine.DeepSpeedEngine._take_model_step = taken

    def _enters_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth[id(optimizer)] = self._depth.get(id(optimizer), 0) + 1

    def _leaves_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # A subclass's step calls that of its base, which PyTorch follows too.
        self._depth[id(optimizer)] = self._depth.get(id(optimizer), 1) - 1
        if not self._depth[id(optimizer)] and not self._engine_steps:
            self._count(optimizer)

    def _count(self, optimizer: Any) -> None:
        self._taken[id(optimizer)] = self._taken.get(id(optimizer), 0) + 1
        if self._taken[id(optimizer)] <= self.record["steps"]:
            return
        self.record["steps"] += 1
        self._close(self.record["steps"])
        if self.record["steps"] == self._steps:
            self._stop()

    def _close(self, step: int) -> None:
        """Write down the peaks since the last time; step 0 is all before the first batch."""
        if not torch.cuda.is_initialized():
            return
        self._note_peaks()
        for device, (allocated, reserved) in sorted(self._most.items()):
            free, total = torch.cuda.mem_get_info(device)
            # What is held beside this process's tensors at their peak is taken to be what is now.
            beside = total - free - torch.cuda.memory_reserved(device)
            span = {"step": step, "device": device, "card": str(torch.cuda.get_device_properties(device).uuid)}
            span |= {"allocated_bytes": allocated, "reserved_bytes": reserved}
            span |= {"beside_bytes": beside, "total_bytes": total}
            self.record["spans"].append(span)
            if self._reset is not None:
                self._reset(device)
        self._most.clear()
        self._write()

    def _runs_out(self, device: int, requested: int, allowed: int, free: int) -> None:
        # A step that this ends is never left.
        self._depth.clear()
        with contextlib.suppress(Exception):
            self.record["failed_allocations"].append(
                {
                    "step": self.record["steps"] + int(self._began),
                    "device": device,
                    "requested_bytes": requested,
                    "allocated_bytes": torch.cuda.memory_allocated(device),
                    "reserved_bytes": torch.cuda.memory_reserved(device),
                    "free_bytes": free,
                    "place": places.here(),
                }
            )
            self._write()

    def _fails(self, error: BaseException, trace: TracebackType | None) -> None:
        text = " ".join(str(error).split())[:_REASON_CHARACTERS]
        place = places.of_traceback(trace)
        chain = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
            chain.append(cause)
        memory = any("out of memory" in str(each).lower() for each in chain)
        self.record |= {
            "ended": "error",
            "error": {"kind": type(error).__name__, "message": text, "out_of_memory": memory, "place": place},
        }
        with contextlib.suppress(Exception):
            self._close(self.record["steps"] + int(self._began))
        self._write()

    def _ends(self) -> None:
        if not self.record["ended"]:
            self.record["ended"] = "finished"
            with contextlib.suppress(Exception):
                self._close(self.record["steps"] + int(self._began))
            self._write()

    def _stop(self) -> None:
        """End the process with code 0 once all ranks of this machine are done."""
        self.record["ended"] = "stopped"
        self._write()
        (self._folder / f"stopped-{self.record['rank']}").touch()
        until = time.monotonic() + _MOST_SECONDS_FOR_OTHERS
        while len(list(self._folder.glob("stopped-*"))) < self.record["local_ranks"]:
            if time.monotonic() > until:
                break
            time.sleep(_GLANCE_SECONDS)
        else:
            (self._folder / "all-stopped").touch()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        logging.shutdown()
        # What the script has behind its training (saving, uploading) is not to run, nor what it does at exit.
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


def _ranks() -> dict[str, int]:
    """Return this process's rank, and how many ranks there are on this machine: by PyTorch, else by the launcher."""
    variables = {name: int(os.environ.get(name) or 0) for name in ("RANK", "LOCAL_WORLD_SIZE")}
    rank, local = variables["RANK"], variables["LOCAL_WORLD_SIZE"]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, local = torch.distributed.get_rank(), local or torch.distributed.get_world_size()
    return {"rank": rank, "local_ranks": local or 1}
