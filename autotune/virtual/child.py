"""The process of a trace that another process handed over: ``python -m autotune.virtual.child FOLDER``.

The folder has the request, and gets the reply: see :mod:`autotune.virtual.apart`.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from autotune.virtual import apart
from autotune.virtual.records import Trace
from autotune.virtual.tracing import trace


def main(folder: Path) -> None:
    """Trace what the request has, and write the reply."""
    reply: Trace | Exception
    try:
        fn, options = apart.read_request(folder)
        reply = trace(fn, **options)
    except Exception as error:  # noqa: BLE001 whatever it is, it is raised where the trace was asked for
        error.add_note("In the process of the trace:\n" + "".join(traceback.format_tb(error.__traceback__)))
        reply = error
    apart.write_reply(folder, reply)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
