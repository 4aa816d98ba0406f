"""Runs a command on null GPUs: ``python -m autotune.nullgpu --gpu H100 --count 2 -- COMMAND``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.nullgpu.devices import null_device, null_device_names
from autotune.nullgpu.environment import environment
from autotune.units import parse_size


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace this process by the command; return an exit code only if that fails."""
    parser = argparse.ArgumentParser(prog="python -m autotune.nullgpu", description="Run a command on null GPUs.")
    names = ", ".join(null_device_names())
    parser.add_argument("--gpu", default="H100-80GB", help=f"a size such as 24GiB, or one of {names}")
    parser.add_argument("--count", type=int, default=1, help="number of GPUs (default: 1)")
    parser.add_argument("--memory", type=parse_size, help="memory that CUDA can allocate on each, such as 8GiB")
    parser.add_argument("--table", type=Path, help="file of allocations; processes with one table share the GPUs")
    parser.add_argument("--alone", action="store_true", help="one process stands for all ranks")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("a command is needed, after --")
    try:
        device = null_device(options.gpu, options.memory)
        variables = environment(device, count=options.count, table=options.table, alone=options.alone)
    except AutotuneError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    try:
        os.execvpe(command[0], command, variables)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return 127


if __name__ == "__main__":
    sys.exit(main())
