"""``autotune.plan``: predicted memory and speed of every candidate on a GPU that need not be here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from autotune.api.given import given
from autotune.app.options import checked_options
from autotune.app.plan import Asked, check_rows, whole_rows
from autotune.app.plan import plan as planned
from autotune.app.rent import ALL
from autotune.core.candidate import Choice
from autotune.core.estimate import Plan
from autotune.core.events import Listener, ignore
from autotune.errors import InputError
from autotune.trainers import DEFAULT


def plan(
    model: str,
    dataset: str | None = None,
    *,
    trainer: str = DEFAULT,
    eval_dataset: str | None = None,
    eval_split: str | None = None,
    reward_funcs: Iterable[str] = (),
    completion_length: int | str | None = None,
    prompt_coverage: float | None = None,
    gpu: str | None = None,
    num_processes: int | None = None,
    num_machines: int | None = None,
    network: float | None = None,
    seq_len: int | None = None,
    memory_budget: str | int | None = None,
    global_batch_size: int | None = None,
    max_length: int | None = None,
    token_coverage: float | None = None,
    allow: Iterable[str] = (),
    fix: Mapping[str, Choice] | None = None,
    exclude: Iterable[str] = (),
    space: str | Path | None = None,
    top: int = 20,
    explain: bool = False,
    output: str | Path | None = None,
    server_gpus: int | None = None,
    listener: Listener = ignore,
) -> Plan:
    """Predict memory and speed of every legal candidate, by tracing TRL's own training step; no GPU is needed.

    Args:
        model: hub id, local directory, or ``config.json``; no weights are needed.
        dataset: hub id, or a local file or directory; None: rows of ``seq_len`` tokens.
        trainer: which of TRL's trainers.
        eval_dataset: rows that training is evaluated on, named like ``dataset``; None: a split of that, or none.
        eval_split: split of ``eval_dataset``, or of ``dataset``, that training is evaluated on; None: no evaluation or,
            with ``eval_dataset``, its ``test`` split, and all of a file.
        reward_funcs: for trainers that generate completions: reward functions, as dotted paths such as
            ``my_rewards.length`` or in TRL's own names; none: one of TRL's that costs nothing.
        completion_length: mean tokens of their completions, or the column of ``dataset`` that holds typical ones; None:
            half of ``max_completion_length``.
        prompt_coverage: share of the prompts, above 0 and up to 1, that those trainers keep, of training and of
            evaluation each: the longest are dropped, since these trainers cut none. None: 1.
        gpu: name of a GPU, such as ``H100-80GB``, a size such as ``24GiB``, or ``cpu``; None: this machine's.
            ``all`` is for :func:`autotune.rent`.
        num_processes: processes that train together, each on a GPU of its own; None: one, or one on each of this
            machine's GPUs.
        num_machines: machines that these are in; None: as few as have eight each.
        network: Gbit/s that each of several machines sends to the others in all, in one direction, such as 3200 for
            eight links of 400; None: not known, and communication is timed as if all GPUs were in one machine.
        seq_len: tokens of each row, where there is no dataset.
        memory_budget: memory that training may need, such as ``24GiB`` or in bytes; None: all of the GPU.
        global_batch_size: documents per optimizer step, which are rows of the dataset however they are packed; None: 8,
            as TRL's defaults give.
        max_length: tokens to which rows are cut, or over which the trainer drops them; None: every choice of the space,
            within the token coverage.
        token_coverage: share of the dataset's tokens that must be trained on; None: 0.99.
        allow: knobs whose training-changing choices are looked at, such as ``lora``.
        fix: by knob, the only choice to look at.
        exclude: knobs that stay at TRL's default.
        space: a space file instead of the one that ships with autotune.
        top: how many of the best candidates are to stand on traces of their own. The best one does in any case; with a
            large space, not all of the others do: :attr:`Estimate.origin` says which.
        explain: whether :attr:`Plan.explanation` says how the estimate of one candidate came about: of the fastest that
            fits, or of the baseline where nothing does. Fix knobs to choose the candidate.
        output: directory of a bundle of the fastest that is predicted to fit, in which nothing is measured:
            :attr:`Plan.bundle` says what was written, or :attr:`Plan.unwritten` why nothing was. None: no files.
        server_gpus: GPUs of ``num_processes`` on which a vLLM server generates; the others train. ``vllm=server`` is
            fixed then, and has to be fixed or allowed by the user. None: such a server has further GPUs.
        listener: is told what happens.

    Raises:
        InputError: something that was given cannot be used.
        AutotuneError: processes cannot be started.
    """
    if gpu == ALL:
        raise InputError("autotune.plan plans for one GPU.", hint="autotune.rent compares all of the catalogue.")
    # A generator can be read only once.
    reward_funcs, allow, exclude = tuple(reward_funcs), tuple(allow), tuple(exclude)
    settings = given(plan, locals())
    asked = Asked(
        model,
        dataset,
        gpu,
        seq_len,
        memory_budget,
        top,
        settings,
        explain,
        eval_dataset,
        eval_split,
        num_machines,
        network,
        output,
        server_gpus,
    )
    check_rows(asked, token_coverage=token_coverage, prompt_coverage=prompt_coverage)
    fixed = dict(fix or {})
    options = checked_options(
        trainer=trainer,
        num_processes=num_processes,
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
    return planned(asked, options, listener)
