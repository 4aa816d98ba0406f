"""``autotune.probe``: search, confirm, and hand over the fastest configuration that fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from autotune.api.given import given
from autotune.api.result import ProbeResult
from autotune.app.options import checked_options
from autotune.app.probe import Asked
from autotune.app.probe import probe as search
from autotune.core.candidate import Choice
from autotune.core.events import Listener, ignore
from autotune.core.workload import Init
from autotune.trainers import DEFAULT
from autotune.userconfig.written import written


def probe(
    model: str | None = None,
    dataset: str | None = None,
    *,
    base: str | Path | None = None,
    trainer: str | None = None,
    eval_dataset: str | None = None,
    eval_split: str | None = None,
    reward_funcs: Iterable[str] = (),
    completion_length: int | str | None = None,
    prompt_coverage: float | None = None,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    num_processes: int | None = None,
    workers: int | Literal["auto"] | None = None,
    memory_budget: str | int | None = None,
    margin: float = 0.05,
    global_batch_size: int | None = None,
    max_length: int | None = None,
    token_coverage: float | None = None,
    allow: Iterable[str] = (),
    fix: Mapping[str, Choice] | None = None,
    exclude: Iterable[str] = (),
    space: str | Path | None = None,
    effort: str = "normal",
    trials: int | None = None,
    timeout: str | float | None = None,
    init: Init = "random",
    seed: int = 42,
    storage: str | None = None,
    study: str | None = None,
    resume: bool = False,
    output: str | Path | None = None,
    plan: bool = True,
    listener: Listener = ignore,
) -> ProbeResult:
    """Search for the fastest configuration that fits, by training steps in processes of their own on this machine.

    Args:
        model: hub id, local directory, or ``config.json``; None: as ``base`` says.
        dataset: hub id, or a local file or directory, in any format that the trainer takes; None: as ``base`` says.
        base: a configuration of TRL's in YAML to start from: what it says stays, and only what makes it faster or fit
            changes, comments and order kept; the recommendation is compared with it. None: TRL's defaults.
        trainer: which of TRL's trainers; None: the one that ``base`` is for, or the default one.
        eval_dataset: rows that training is evaluated on, named like ``dataset``; None: a split of that, or none.
        eval_split: split of ``eval_dataset``, or of ``dataset``, that training is evaluated on; None: no evaluation or,
            with ``eval_dataset``, its ``test`` split, and all of a file.
        reward_funcs: for trainers that generate completions: reward functions, as dotted paths such as
            ``my_rewards.length`` or in TRL's own names; none: one of TRL's that costs nothing.
        completion_length: mean tokens of their completions, or the column of ``dataset`` that holds typical ones; None:
            half of ``max_completion_length``.
        prompt_coverage: share of the prompts, above 0 and up to 1, that those trainers keep, of training and of
            evaluation each: the longest are dropped, since these trainers cut none. None: 1.
        device: ``auto`` takes a GPU where there is one.
        num_processes: processes that train together, each on a GPU of its own; None: one on each visible GPU, or a
            single one on a CPU. On a CPU, each has an equal share of the memory. With ``workers``: one.
        workers: how many probe at the same time, from one study: each on ``num_processes`` GPUs of its own, or on an
            equal part of a CPU's cores and memory, which is then what the recommendation is for. ``auto``: as many as
            the GPUs are enough for, one on a CPU. None: one, on all visible GPUs together.
        memory_budget: memory that each process may need, such as ``24GiB`` or in bytes; None: what others leave free.
        margin: share of the budget that is kept free while probing, so that the promise has room.
        global_batch_size: documents per optimizer step, which are rows of the dataset however they are packed; None: as
            ``base`` says, or 8 per process, as TRL's defaults give.
        max_length: tokens to which rows are cut, or over which the trainer drops them; None: searched, within the token
            coverage.
        token_coverage: share of the dataset's tokens that must be trained on; None: 0.99.
        allow: knobs whose training-changing choices may be searched, such as ``lora``.
        fix: by knob, the only choice to consider.
        exclude: knobs that stay at TRL's default, or as ``base`` says.
        space: a space file instead of the one that ships with autotune.
        effort: ``quick``, ``normal`` or ``thorough``.
        trials: probes at the most; None: as the effort says.
        timeout: for the whole search, such as ``10m`` or in seconds.
        init: ``random`` needs no weights; ``pretrained`` loads them.
        seed: of the search and of the order of batches.
        storage: URL of an Optuna storage: a database as Optuna takes it, ``journal:///path`` for a journal on a file
            system, or ``grpc://host:port``; None: ``study.db`` in the output directory.
        study: name of the study in it; None: the output directory's name.
        resume: whether to continue the study that is there, or to join the processes that search it.
        output: directory of the bundle; None: ``autotune-<model>-<dataset>``, or ``autotune-<base>``.
        plan: whether steps are traced before the first probe, so that what cannot fit is not probed.
        listener: receives the events of the run, as they happen; with ``workers`` from several threads, one at a time.

    Raises:
        InputError: something that was given cannot be used.
        AutotuneError: probes cannot be started, or the study or bundle cannot be written.
    """
    # A generator can be read only once.
    reward_funcs, allow, exclude = tuple(reward_funcs), tuple(allow), tuple(exclude)
    settings = given(probe, locals())
    own = written(str(base), trainer) if base is not None else None
    kept = storage, study, resume, output
    asked = Asked(model, dataset, memory_budget, init, *kept, plan, settings, eval_dataset, eval_split, own)
    options = checked_options(
        trainer=own.trainer if own is not None else trainer or DEFAULT,
        reward_funcs=reward_funcs,
        completion_length=completion_length,
        prompt_coverage=prompt_coverage,
        device=device,
        num_processes=num_processes,
        workers=workers,
        margin=margin,
        global_batch_size=global_batch_size,
        max_length=max_length,
        token_coverage=token_coverage,
        allow=allow,
        fix=fix,
        exclude=exclude,
        space=space,
        effort=effort,
        trials=trials,
        timeout=timeout,
        seed=seed,
    )
    return ProbeResult(search(asked, options, listener))
