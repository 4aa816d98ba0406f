"""Command line of the child side: the job server, or a single job.

``python -m autotune.step`` serves jobs: one JSON object per line on standard input, one per line on what was standard
output when it started (anything printed later goes to standard error).

    {"start": FOLDER}        ->  {"event": "started", "pid": N}, then
                                 {"event": "exited", "code": N or null, "signal": N or null}
    {"kill": true}           ->  the running job's process group is killed and its "exited" follows;
                                 {"event": "idle"} when none is running
    {"fork": FOLDER}         ->  a copy of the server runs jobs in itself, one after another, parallel to the server's

The first line out is {"event": "ready", "pid": N}. At the end of its input the server kills the running job and exits.
A copy reads its commands from the named pipe ``commands`` in its folder, and writes its events to the pipe ``events``:
"ready", then {"event": "exited", "code": N} for each {"start": FOLDER}. It exits at the end of its input, or with the
server.
``python -m autotune.step --once FOLDER`` runs the job in FOLDER in this very process.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path


def main() -> int:
    """Parse the command line and serve jobs or run one; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m autotune.step", description="Run measuring jobs.")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True, help="the device that jobs run on")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="most processes of a job, one for a GPU")
    parser.add_argument("--cores", metavar="N[,N]", help="the CPU cores to run on (default: all that are allowed)")
    parser.add_argument("--once", metavar="FOLDER", type=Path, help="run the job in FOLDER and exit")
    parser.add_argument("--parent", metavar="PID", type=int, help="die when this process, the parent, has ended")
    parser.add_argument("--spawn", action="store_true", help="start a new interpreter for each job instead of forking")
    parser.add_argument("--jobs", metavar="MODULE", help="a module whose JOBS are offered too")
    arguments = parser.parse_args()

    from autotune.step.imports import prepare_environment
    from autotune.step.process import die_with

    if arguments.parent is not None:
        die_with(arguments.parent)
    if arguments.cores is not None:
        # Before torch is imported, whose pools of threads are as large as the cores are many.
        os.sched_setaffinity(0, map(int, arguments.cores.split(",")))
    prepare_environment(arguments.device, arguments.processes)
    if arguments.once is not None:
        from autotune.step.child import run_once

        return run_once(arguments.once, arguments.jobs, child_arguments(arguments))
    from autotune.step.server import Server

    words = child_arguments(arguments)
    return Server(words, device=arguments.device, spawn=arguments.spawn, jobs_module=arguments.jobs).serve()


def child_arguments(arguments: argparse.Namespace) -> list[str]:
    """Return the words of the command line that another process needs to run the same jobs."""
    words = ["--device", arguments.device, "--processes", str(arguments.processes)]
    return [*words, "--jobs", arguments.jobs] if arguments.jobs is not None else words


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # noqa: BLE001 the process boundary: the parent shows the end of the log
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The libraries' exit handlers take long and print warnings about leaks.
    os._exit(status)
