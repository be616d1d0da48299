"""Who runs the tasks: this process, or several on this machine."""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxtrain.data.tasks import Options, Task


def run(do: Callable[..., int], tasks: Sequence[Task], missing: Sequence[int], output: Path,
        options: Options, plan: str, workers: int) -> Iterator[int]:
    """Do the missing tasks; yields the number of each that is done."""
    if workers == 1 or len(missing) < 2:
        for number in missing:
            yield do(number, tasks[number], output, options, plan)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are the parallelism
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(workers, len(missing)), mp_context=context) as pool:
        futures = [pool.submit(do, number, tasks[number], output, options, plan) for number in missing]
        try:
            for future in concurrent.futures.as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


