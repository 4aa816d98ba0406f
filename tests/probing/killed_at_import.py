"""A module of jobs that kills the importing process, as the kernel does if memory runs out."""

from __future__ import annotations

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
