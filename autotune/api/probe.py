"""``autotune.probe``: search, confirm, and hand over the fastest configuration that fits."""

from __future__ import annotations

from autotune.api.result import ProbeResult
from autotune.app.arguments import ProbeArguments
from autotune.app.probe import probe as search
from autotune.app.public import taking


@taking(ProbeArguments)
def probe(asked: ProbeArguments) -> ProbeResult:
    """Search for the fastest configuration that fits, by training steps in processes of their own on this machine.

    With ``workers``, the listener is called from several threads, one at a time.

    Raises:
        InputError: something that was given cannot be used.
        AutotuneError: probes cannot be started, or the study or bundle cannot be written.
    """
    return ProbeResult(search(asked))
