"""Which documents are the first of their kind: found before anything is tokenised, for it depends on all tasks."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxtrain.data import engines, files
from jaxtrain.data.corpus import UNFINISHED
from jaxtrain.data.engines import Engine
from jaxtrain.data.progress import Progress
from jaxtrain.data.tasks import Options, Task, documents, keep_path, key_of, stamp


def find_duplicates(tasks: Sequence[Task], output: Path, options: Options, workers: int | Engine,
                    say: Callable[[str], None] = lambda line: None) -> None:
    """Say of each task's documents which are the first of their kind, in the order of the input."""
    hash_documents(tasks, range(len(tasks)), output, options, workers, say)
    keys = [np.load(_keys_path(output, number, task, options)) for number, task in enumerate(tasks)]
    flat = np.concatenate([np.zeros(0, "V16"), *keys])
    first = np.zeros(len(flat), bool)
    first[np.unique(flat, return_index=True)[1]] = True
    for number, keep in enumerate(np.split(first, np.cumsum([len(some) for some in keys])[:-1])):
        with files.written(keep_path(output, number)) as file:
            np.save(file, keep)


def hash_documents(tasks: Sequence[Task], numbers: Sequence[int], output: Path, options: Options,
                   workers: int | Engine, say: Callable[[str], None]) -> None:
    """What is compared, of those of the tasks where it is not there yet."""
    missing = [number for number in numbers if not _keys_path(output, number, tasks[number], options).exists()]
    progress = Progress("duplicates", tasks, numbers, missing, say)
    for number in engines.run(hash_task, tasks, missing, output, options, "", workers):
        progress.add(number)


def hash_task(number: int, task: Task, output: str | Path, options: Options, plan: str) -> int:
    """The keys of a task's documents, in order."""
    path = _keys_path(Path(output), number, task, options)  # now: the input might change meanwhile
    keys = b"".join(key_of(found) for found, _ in documents(task, options, {}))
    with files.written(path) as file:
        np.save(file, np.frombuffer(keys, "V16"))
    return number


def _keys_path(output: Path, number: int, task: Task, options: Options) -> Path:
    """Another one for other input, so that what is there is right."""
    version = files.digest([options.identity(), [[piece.identity(), stamp(piece)] for piece in task]])
    return output / UNFINISHED / f"{number:05}.{version[:16]}.keys.npy"
