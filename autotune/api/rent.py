"""``autotune.rent``: which of many GPUs fit a training, how fast it is there, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from autotune.api.given import given
from autotune.app.options import checked_options
from autotune.app.plan import Asked, check_rows, whole_rows
from autotune.app.rent import ALL, AUTO, Wanted
from autotune.app.rent import rent as looked_at
from autotune.core.candidate import Choice
from autotune.core.events import Listener, ignore
from autotune.core.rent import Rent
from autotune.inspection.prices import checked_prices, read_prices
from autotune.trainers import DEFAULT


def rent(
    model: str,
    dataset: str | None = None,
    *,
    trainer: str = DEFAULT,
    eval_dataset: str | None = None,
    eval_split: str | None = None,
    reward_funcs: Iterable[str] = (),
    completion_length: int | str | None = None,
    prompt_coverage: float | None = None,
    gpu: str | None = ALL,
    num_processes: int | Literal["auto"] = 1,
    num_machines: int | None = None,
    network: float | None = None,
    prices: str | Path | Mapping[str, float] | None = None,
    seq_len: int | None = None,
    memory_budget: str | int | None = None,
    global_batch_size: int | None = None,
    max_length: int | None = None,
    token_coverage: float | None = None,
    allow: Iterable[str] = (),
    fix: Mapping[str, Choice] | None = None,
    exclude: Iterable[str] = (),
    space: str | Path | None = None,
    listener: Listener = ignore,
) -> Rent:
    """Predict for every GPU of the catalogue whether a training fits there, how fast it is, and what it costs.

    Parameters that are not named here are those of :func:`autotune.plan`.

    Args:
        gpu: ``all``, or one GPU as :func:`autotune.plan` takes it, whose numbers are compared.
        num_processes: GPUs that train together; ``auto``: the fewest of 1, 2, 4, 8, 16, 32 and 64 with which something
            fits, of those that divide the global batch, and more as long as each of them then trains more tokens.
        num_machines: machines that these are in; None: as few as have eight each.
        network: Gbit/s of each of several machines; numbers of GPUs that one machine has do without.
        prices: of an hour of one GPU, by its name; or a YAML or CSV file of them. None: nothing is said of cost.
        memory_budget: memory that training may need on each GPU; None: all of it. Of a GPU with less, all of it.

    Raises:
        InputError: something that was given cannot be used.
        AutotuneError: processes cannot be started.
    """
    # A generator can be read only once.
    reward_funcs, allow, exclude = tuple(reward_funcs), tuple(allow), tuple(exclude)
    settings = given(rent, locals())
    asked = Asked(
        model,
        dataset,
        gpu,
        seq_len,
        memory_budget,
        1,
        settings,
        False,
        eval_dataset,
        eval_split,
        num_machines,
        network,
    )
    check_rows(asked, token_coverage=token_coverage, prompt_coverage=prompt_coverage)
    known = None
    if prices is not None:
        known = checked_prices(prices.items(), "prices") if isinstance(prices, Mapping) else read_prices(prices)
    fixed = dict(fix or {})
    options = checked_options(
        trainer=trainer,
        num_processes=None if num_processes == AUTO else num_processes,
        reward_funcs=reward_funcs,
        completion_length=completion_length,
        prompt_coverage=prompt_coverage,
        global_batch_size=global_batch_size,
        max_length=whole_rows(trainer, seq_len, fixed, exclude) if max_length is None else max_length,
        token_coverage=token_coverage,
        allow=allow,
        fix=fixed,
        exclude=exclude,
        space=space,
    )
    return looked_at(asked, options, Wanted(num_processes, num_machines, known), listener)
