"""What a check is asked for; nothing heavy is needed to know that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autotune.confidential import hidden_values, hidden_words
from autotune.errors import InputError
from autotune.units import parse_duration

Unsure = Literal["pass", "fail"]


@dataclass(frozen=True)
class Asked:
    """A check, as it was asked for.

    Attributes:
        config: a YAML file of TRL's, or None for a command.
        command: the words of a command; empty for a file.
        trainer, model, dataset: in place of what the configuration says; None: as it says.
        gpu: the GPU to check for, as for ``autotune plan``; None: this machine's.
        memory_budget: memory that the training may need; None: all of the device.
        probe: whether its worst micro-batches are run on this machine's device.
        timeout: time after which that run is ended, such as ``10m`` or in seconds; None: none.
        imports: whether the modules of the user's reward functions are imported, in processes of their own.
        fits: whether to say if it fits; if not, it is only read.
        when_unsure: what an answer that is too close to call, or unknown, counts as; None: neither.
    """

    config: str | None = None
    command: tuple[str, ...] = ()
    trainer: str | None = None
    model: str | None = None
    dataset: str | None = None
    gpu: str | None = None
    memory_budget: str | int | None = None
    probe: bool = False
    timeout: str | float | None = None
    imports: bool = False
    fits: bool = True
    when_unsure: Unsure | None = None

    @property
    def passes(self) -> bool | None:
        """What an answer that is too close to call, or unknown, counts as; None: neither."""
        return None if self.when_unsure is None else self.when_unsure == "pass"

    @property
    def timeout_seconds(self) -> float | None:
        """Time after which a real run is ended.

        Raises:
            InputError: it is no duration.
        """
        return parse_duration(self.timeout) if isinstance(self.timeout, str) else self.timeout

    @property
    def settings(self) -> dict[str, object]:
        """The options, for the document of the verdict."""
        given = {name: value for name, value in vars(self).items() if value not in (None, (), False)}
        words = {"command": hidden_words(self.command)} if self.command else {}
        return {**hidden_values(given), **words}


def check_options(asked: Asked) -> None:
    """Check that the options of a check go together.

    Raises:
        InputError: two of them do not, or one cannot be used.
    """
    if asked.probe and asked.gpu is not None:
        raise InputError("--probe runs on this machine's device.", hint="Leave out --gpu.")
    if asked.timeout is not None and not asked.probe:
        raise InputError("--timeout ends the run of --probe, and there is none.", hint="Give both, or neither.")
    if asked.imports and not asked.fits:
        raise InputError("--import is for building the trainer, which --no-fit leaves out.", hint="Give one of them.")
    seconds = asked.timeout_seconds
    if seconds is not None and seconds <= 0:
        raise InputError(f"A time-out of {seconds:g} seconds is not possible.", hint="It is above 0.")
