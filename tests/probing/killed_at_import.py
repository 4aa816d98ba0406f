"""A module of jobs that kills the process that imports it, as the kernel does for want of memory."""

from __future__ import annotations

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
