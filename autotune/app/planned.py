"""Builds the machine to plan for, this one or another, and reads the workload on this machine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from stat import S_ISREG

from autotune.app.arguments import PlannedArguments
from autotune.app.options import Options
from autotune.app.problem import attentions
from autotune.app.requests import traces_of
from autotune.app.workload import WorkloadReader
from autotune.core.events import Listener
from autotune.core.machine import GPUS_PER_MACHINE, Hardware, Machine
from autotune.core.rows.documents import Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.workload import NO_DATA, DatasetSource, ModelSource, Workload
from autotune.errors import InputError
from autotune.inspection.dataset import evaluation_source, training_source
from autotune.inspection.gpus import find_gpu, present_gpu
from autotune.inspection.machine import machine as inspect_machine
from autotune.inspection.model import model_source
from autotune.inspection.paths import exists
from autotune.planning.tracing.cache import Cache, fingerprint, package_digest, user_cache
from autotune.planning.tracing.store import Traces
from autotune.probing.tracing import ServerTracer
from autotune.trainers import find_trainer
from autotune.units import plural

CPU = "cpu"
# Bytes per second of a Gbit/s, the unit of networks.
_GBIT = 1e9 / 8


def is_cpu(word: str | int | None) -> bool:
    """Return whether a ``--gpu`` is ``cpu``, this machine's CPU."""
    return isinstance(word, str) and word.strip().lower() == CPU


def machines_of(processes: int, requested: int | None) -> int:
    """Return the number of machines: the requested one, or the fewest with at most eight processes each.

    Raises:
        InputError: the machines do not divide the processes.
    """
    machines = -(-processes // GPUS_PER_MACHINE) if requested is None else requested
    if machines < 1 or processes % machines:
        most = f" of at most {GPUS_PER_MACHINE} each" if requested is None else ""
        raise InputError(
            f"{plural(processes, 'process', 'processes')} cannot be divided among {plural(machines, 'machine')}{most}.",
            hint="--num-processes counts the processes of all machines, and is a multiple of --num-machines.",
        )
    return machines


def check_network(network: float | None, planned: Sequence[Machine]) -> None:
    """Check that the rate of a network is valid, and that predicted times depend on it.

    Args:
        network: Gbit/s of each machine's network; None: unknown.
        planned: all machines that are planned for.

    Raises:
        InputError: the rate is not above 0 and finite, or has no effect.
    """
    if network is None:
        return
    if not 0 < network < math.inf:
        raise InputError(
            f"A network of {network:g} Gbit/s is not possible.",
            hint="--network is the total rate of one machine's links, such as 400, or 3200 for eight links of 400.",
        )
    if all(each.device.speeds is None for each in planned):
        raise InputError(
            f"The speed of {planned[0].device.name} is not known, so --network changes nothing.",
            hint="Name a GPU, as with --gpu H100-80GB, or leave out --network.",
        )
    if all(each.hardware.machines == 1 for each in planned):
        raise InputError(
            "--network is the network between machines, and there is one machine.",
            hint="Leave it out, or give --num-machines, or more than 8 --num-processes.",
        )


def planned_machine(
    word: str | int | None,
    processes: int | None = None,
    machines: int | None = None,
    network: float | None = None,
    visible: str | None = None,
) -> Machine:
    """Return the machine with the device of a ``--gpu``; None: this machine's own GPUs.

    Args:
        processes: number of processes that train together, one per GPU; None: one, or one on each of this machine's
            own GPUs.
        machines: number of machines; None: see :func:`machines_of`, or one for this machine's own GPUs.
        network: total Gbit/s that each of several machines sends to the others, in one direction; None: unknown.
        visible: ``CUDA_VISIBLE_DEVICES`` of a training on this machine's own GPUs; None: that of this process.

    Raises:
        InputError: the word names no known GPU, there is neither a word nor a GPU, or the machines do not divide the
            processes.
    """
    here = inspect_machine("cpu")
    if is_cpu(word):
        if machines not in (None, 1):
            raise InputError(
                f"A training on the CPU is planned for this machine alone, and {machines} machines were asked for.",
                hint="Leave out --num-machines, or name a GPU with --gpu.",
            )
        return inspect_machine("cpu", processes)
    if word is None:
        own = inspect_machine("auto", None, visible)
        if own.hardware.kind == CPU:
            raise InputError(
                f"There is no GPU here: {own.device_reason}.",
                hint="Name one with `gpu` (`--gpu`); `autotune plan --gpu list` lists those that are known.",
            )
        count = processes or own.hardware.processes
        within = machines is None and count <= own.hardware.processes
        machines = 1 if within else machines_of(count, machines)
        # Only the GPUs that train count: other users may fill the rest.
        own = inspect_machine("auto", min(own.hardware.processes, count // machines), visible)
        hardware, gpu = replace(own.hardware, processes=count, machines=machines), present_gpu(own.hardware)
        planned = replace(own, hardware=hardware, planned=True, host_bytes=here.hardware.memory_bytes)
    else:
        gpu = find_gpu(word)
        hardware = Hardware(
            kind="cuda",
            name=gpu.name,
            memory_bytes=gpu.memory_bytes,
            compute_capability=gpu.compute_capability,
            processes=processes or 1,
            machines=machines_of(processes or 1, machines),
            cores=here.hardware.cores,
        )
        planned = Machine(hardware, here.packages, planned=True)
    between = network * _GBIT if network is not None and hardware.machines > 1 else None
    return replace(planned, gpu=gpu.networked(between))


def planned_sources(args: PlannedArguments) -> tuple[ModelSource, DatasetSource | None, DatasetSource | None]:
    """Return the model, the training rows and the evaluation rows; None for rows that are not given.

    Raises:
        InputError: one of them cannot be used.
    """
    return (
        model_source(args.model, "random", tokenizes=args.dataset is not None),
        training_source(args.dataset, args.split, args.dataset_config),
        evaluation_source(args.dataset, args.eval_dataset, args.eval_split, args.split, args.dataset_config),
    )


@contextmanager
def planned_traces(
    args: PlannedArguments,
    options: Options,
    sources: tuple[ModelSource, DatasetSource | None, DatasetSource | None],
    planned: Sequence[Machine],
    batch: int,
    listener: Listener,
) -> Iterator[tuple[Workload, Traces, Callable[[], Workload]]]:
    """Yield the workload, its traces for all planned machines, and a function that reads it with the tokenised rows.

    Args:
        sources: as :func:`planned_sources` returns them.
        batch: documents of an optimizer step.
        listener: receives the progress of traces.

    Raises:
        InputError: the model or the dataset cannot be used.
    """
    (model, rows, evaluation), cache = sources, user_cache()
    with ServerTracer(planned[0].hardware.cores, listener) as tracer:
        read = partial(planned_workload, options, model, rows, tracer, cache, args.listener, evaluation)
        workload = read() if args.seq_len is None else rows_of_length(read(), args.seq_len, batch)
        devices = [each.device for each in planned]
        yield workload, traces_of(workload, planned[0], tracer, cache, devices), partial(read, rows_needed=True)


def planned_workload(
    options: Options,
    model: ModelSource,
    dataset: DatasetSource | None,
    tracer: ServerTracer,
    cache: Cache | None,
    listener: Listener,
    evaluation: DatasetSource | None = None,
    *,
    checked: tuple[str, ...] | None = None,
    most_seconds: float | None = None,
    rows_needed: bool = False,
) -> Workload:
    """Return the workload, with the self-test of the attention implementations that run on a CPU.

    A local model with a local dataset is cached on disk until one of their files changes.

    Args:
        dataset: None: a placeholder of a few words, whose lengths are not meaningful.
        cache: None: nothing is cached.
        evaluation: the rows that training is evaluated on, or None.
        checked: the attention implementations to test; None: all that the options allow.
        most_seconds: time limit for reading and tokenising; None: no limit.
        rows_needed: whether the caller reads the tokenised rows, which the cache does not hold.

    Raises:
        InputError: the model or the dataset cannot be used.
    """
    here = inspect_machine("cpu")
    states = [state_of(each.name) for each in (model, options.teacher) if each is not None]
    read = (source for source in (dataset, evaluation) if source is not None)
    states += [state_of(place) for source in read for place in source.places]
    name, wanted = options.trainer.name, attentions(options, here) if checked is None else checked
    inputs = name, model, dataset, evaluation, options.rollouts, options.teacher
    adapter, cache = options.peft, cache if all(state is not None for state in states) else None
    if dataset is None and options.rollouts.column is not None:
        raise InputError("--completion-length names a column, and there is no dataset.", hint="Give a DATASET.")
    key = fingerprint("workload", *inputs, adapter, states, wanted, here.packages, package_digest())
    known = cache.get(Workload, key) if cache is not None and not rows_needed else None
    if known is not None:
        return known
    reader = WorkloadReader(tracer.server, tracer.new_folder(), listener, most_seconds)
    rows = dataset
    if rows is None:
        file = tracer.folder / "rows.jsonl"
        file.write_text((json.dumps(dict(options.trainer.stand_in)) + "\n") * 2, encoding="utf-8")
        rows = DatasetSource(NO_DATA, "json", str(file))
    workload = reader.read(options.trainer.name, model, rows, evaluation, options.rollouts, adapter, options.teacher)
    if wanted:
        workload = reader.check_attention(workload, here, wanted, user_cache())
    # Traces read rows with images themselves, which a cached workload lacks.
    if cache is not None and not workload.has_images:
        cache.put(key, workload)
    return workload


def rows_of_length(workload: Workload, tokens: int, rows: int) -> Workload:
    """Return the workload with ``rows`` rows of ``tokens`` tokens as its dataset."""
    trainer = find_trainer(workload.trainer)
    parts, trainable = trainer.row_of(tokens)
    dataset = replace(
        workload.dataset,
        name=f"rows of {tokens} tokens",
        lengths=LengthDistribution({tokens: rows}),
        images=None,
        trainable_tokens=rows * trainable,
        several=None if workload.dataset.several is None else Documents.of_groups([(rows, *trainer.document(parts))]),
    )
    return replace(workload, dataset=dataset)


def state_of(name: str) -> list[tuple[str, int, int]] | None:
    """Return names, sizes and modification times of the files at a path; None if there are none."""
    path = Path(name)
    if not exists(path):
        return None
    seen = []
    for file in [path] if path.is_file() else path.rglob("*"):
        with suppress(OSError):  # removed meanwhile, unreadable, or a broken or circular link
            found = file.stat()
            if S_ISREG(found.st_mode):
                seen.append((str(file.relative_to(path)), found.st_size, found.st_mtime_ns))
    return sorted(seen)
