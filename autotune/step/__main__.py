"""Command line of the child side: the job server, or a process that it starts.

``python -m autotune.step`` starts processes for jobs. Its standard input is a connection of :mod:`multiprocessing`. The
server sends {"event": "ready", "pid": N} once it has imported the libraries. Each handle that it receives is the
connection to a new process, which carries dictionaries:

    from the server, at the start        {"event": "ready", "pid": N}
    to the process, one after another    {"start": FOLDER, "env": {...} of a rank of several, or {}}
    from the process, after each job     {"event": "done", "code": 0, "signal": None}
    from the server, at the end          {"event": "ended", "code": N or None, "signal": N or None}

A process leads a process group, whose other members are killed when it ends. It exits at the end of its input, or when
the server exits. At the end of its own input, the server kills all processes and exits.
``python -m autotune.step --worker`` is such a process; its standard input is the connection.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback


def main() -> int:
    """Parse the command line and serve jobs or run one; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m autotune.step", description="Run measuring jobs.")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True, help="the device that jobs run on")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="most processes of a job, one for a GPU")
    parser.add_argument("--cores", metavar="N[,N]", help="the CPU cores to run on (default: all that are allowed)")
    parser.add_argument("--worker", action="store_true", help="run the jobs that standard input names")
    parser.add_argument("--spawn", action="store_true", help="start a new interpreter for each process, without a fork")
    parser.add_argument("--jobs", metavar="MODULE", help="a module whose JOBS are offered too")
    arguments = parser.parse_args()

    from autotune.step.imports import prepare_environment

    if arguments.cores is not None:
        # Before torch is imported: its thread pools have one thread per allowed core.
        os.sched_setaffinity(0, map(int, arguments.cores.split(",")))
    prepare_environment(arguments.device, arguments.processes)
    if arguments.worker:
        from autotune.step.child import run_worker

        return run_worker(arguments.jobs)
    from autotune.step.server import Server

    return Server(device=arguments.device, spawn=arguments.spawn, jobs_module=arguments.jobs).serve()


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # noqa: BLE001 the process boundary: the parent shows the end of the log
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The libraries' exit handlers are slow and print warnings about leaks.
    os._exit(status)
