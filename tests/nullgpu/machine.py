"""A machine of null GPUs for tests, which run programs there in separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from autotune.nullgpu.devices import null_device
from autotune.nullgpu.environment import environment
from autotune.nullgpu.installation import missing_requirements

ROOT = Path(__file__).parents[2]
NEEDS_CUDA_BUILD = [
    pytest.mark.cuda_build,
    pytest.mark.skipif(
        bool(missing_requirements()), reason=f"a null GPU needs {missing_requirements()}: make test-cuda"
    ),
]


@dataclass(frozen=True)
class NullMachine:
    """Null GPUs that only the programs of one test use."""

    table: Path

    def environment(
        self,
        gpu: str = "H100-80GB",
        count: int = 1,
        memory_bytes: int | None = None,
        alone: bool = False,
        **further: str,
    ) -> dict[str, str]:
        """Return the environment of a program on these GPUs."""
        found = environment(null_device(gpu, memory_bytes), count=count, table=self.table, alone=alone)
        paths = [*filter(None, [found.get("PYTHONPATH")]), str(ROOT)]
        return {**found, "PYTHONPATH": os.pathsep.join(paths), **further}

    def start(self, program: str, *arguments: str, variables: dict[str, str]) -> subprocess.Popen[str]:
        """Start a Python program."""
        command = [sys.executable, "-W", "ignore", "-c", dedent(program), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def run(self, program: str, *arguments: str, **options: Any) -> Any:
        """Run a Python program that prints JSON in its last line, and return that."""
        with self.start(program, *arguments, variables=self.environment(**options)) as process:
            return ended(process)

    def run_all(self, *programs: str) -> list[Any]:
        """Run programs one after another in one process, and return what each prints as JSON in one line."""
        with self.start("\n".join(map(dedent, programs)), variables=self.environment()) as process:
            return [json.loads(line) for line in printed(process)[-len(programs) :]]


def ended(process: subprocess.Popen[str]) -> Any:
    """Wait for a program that prints JSON in its last line, and return that."""
    return json.loads(printed(process)[-1])


def printed(process: subprocess.Popen[str]) -> list[str]:
    """Wait for a program, and return the lines that it prints."""
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-4000:]
    return out.splitlines()
