"""Chooses which numbers of GPUs are planned for with ``auto``, and which of them a table shows."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.app.options import Options
from autotune.core.rent import Offer
from autotune.errors import InputError

NUMBERS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of GPUs that are tried for ``auto``: in one machine, and in whole machines of eight."""
_WORTH = 0.05
"""Share by which more GPUs have to train more tokens each: then they cost less, whatever the price of one."""


def divisible_counts(batch: int, options: Options, machines: int | None) -> Sequence[int]:
    """Return the numbers of GPUs among which a global batch can be shared out, on a number of machines if it is given.

    Raises:
        InputError: there is none.
    """
    shared = options.ranks_per_row
    found = [number for number in NUMBERS if number % shared == 0 and batch % (number // shared) == 0]
    found = [number for number in found if machines is None or (machines > 0 and number % machines == 0)]
    if found:
        return found
    among = "" if machines is None else f" in {machines} machines"
    raise InputError(
        f"A global batch of {batch} documents cannot be shared out among any number of GPUs that is tried{among}.",
        hint=f"Give another --global-batch-size or --num-machines; tried are {', '.join(map(str, NUMBERS))} GPUs.",
    )


def should_try_more_gpus(tried: Sequence[Offer], *, alone: bool) -> bool:
    """Return whether a larger number of GPUs of a kind is worth a plan.

    It is until something fits, and further as long as each GPU trains more tokens per second than with fewer GPUs:
    with the fewest, only what is slow may fit.

    Args:
        alone: whether it is the only kind: where no speed is known, one number more is then planned.
    """
    fitting = [offer for offer in tried if offer.fits]
    if not fitting:
        return True
    if fitting[-1].gpu.speeds is None:
        return alone and len(fitting) == 1
    last = fitting[-1].rate_of_each
    if len(fitting) == 1 or last is None:
        return True
    return last > (1 + _WORTH) * max(offer.rate_of_each or 0.0 for offer in fitting[:-1])


def offers_to_show(tried: Sequence[Offer], *, alone: bool) -> Sequence[Offer]:
    """Return the offers that a table shows of the planned numbers of GPUs: all of a single kind.

    Of one of several kinds, these are the fewest GPUs that fit, and the number with which each trains the most tokens
    per second; what is nearest to fitting where nothing fits.
    """
    fitting = [offer for offer in tried if offer.fits]
    if alone or not fitting:
        return tried if alone else tried[-1:]
    fewest, best = fitting[0], max(fitting, key=lambda offer: offer.rate_of_each or 0.0)
    least = (1 + _WORTH) * (fewest.rate_of_each or 0.0)
    return [fewest, best] if (best.rate_of_each or 0.0) > least else [fewest]
