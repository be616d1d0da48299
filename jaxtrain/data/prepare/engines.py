"""Run tasks in this process, in several processes of this machine, or by an engine such as `on_ray.Ray`."""

import concurrent.futures
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from jaxtrain.data.prepare.tasks import Options, Task
from jaxtrain.errors import UserError

T = TypeVar("T")
Calls = Sequence[tuple[Any, ...]]  # the arguments of each task
Engine = Callable[[Callable[..., int], Calls], Iterator[int]]  # makes all calls and yields their results in any order


def run(do: Callable[..., int], tasks: Sequence[Task], missing: Sequence[int], output: Path,
        options: Options, plan: str, workers: int | Engine) -> Iterator[int]:
    """Do the missing tasks in `workers` processes or through an engine; yield each one's number when it is done."""
    calls = [(number, tasks[number], output, options, plan) for number in missing]
    if callable(workers):
        yield from workers(do, calls)
    elif workers == 1 or len(calls) < 2:
        for call in calls:
            yield do(*call)
    else:
        yield from in_processes(do, calls, min(workers, len(calls)))


def in_processes(do: Callable[..., T], calls: Calls, workers: int) -> Iterator[T]:
    """Make all calls in so many processes of this machine, and yield their results in any order."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the worker processes are the parallelism
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context, _end_with_parent) as pool:
        try:
            for future in concurrent.futures.as_completed([pool.submit(do, *call) for call in calls]):
                yield future.result()
        except BrokenProcessPool as error:
            raise UserError("--workers", "a worker was killed, most likely because memory ran out",
                            "run again with fewer, or smaller --task_bytes") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """End this worker once the process that started it is gone, even if that was killed.

    A killed process cannot stop its workers, which would finish their tasks and then wait for more without end. Once
    they are gone, so is multiprocessing's resource tracker.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end_with_parent").start()
