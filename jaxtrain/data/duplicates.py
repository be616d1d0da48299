"""Which documents are the first of their kind: found before anything is tokenised, for it depends on all tasks.

A task writes what is to be compared of its documents, once; then all are compared in this process, in the order of the
input. That takes 24 bytes of memory a document for equal ones and about 50 for nearly equal ones, whatever they hold.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxtrain.data import engines, files
from jaxtrain.data.corpus import UNFINISHED
from jaxtrain.data.steps import Steps
from jaxtrain.data.tasks import Options, Task, documents, key_of, stamps, verdicts_path


def find_duplicates(tasks: Sequence[Task], output: Path, options: Options, plan: str, workers: int) -> None:
    """Say of each task's documents which are like an earlier one, in the order of the input."""
    missing = [number for number, task in enumerate(tasks) if not _is_signed(output, number, task, plan)]
    for _ in engines.run(sign_task, tasks, missing, output, options, plan, workers):
        pass
    keys = [np.load(_path(output, number, "keys")) for number in range(len(tasks))]
    starts = np.cumsum([0, *map(len, keys)])
    flat = np.concatenate([np.zeros(0, "V16"), *keys])
    del keys
    verdicts = np.ones(len(flat), np.uint8)
    different = np.sort(np.unique(flat, return_index=True)[1])
    verdicts[different] = 0
    if options.deduplicate == "near":
        del flat
        first = options.near.firsts(len(different), *_columns(output, starts, different))
        verdicts[different[first != np.arange(len(first))]] = 2
    for number, some in enumerate(np.split(verdicts, starts[1:-1])):
        with files.written(verdicts_path(output, number)) as file:
            np.save(file, some)


def sign_task(number: int, task: Task, output: str | Path, options: Options, plan: str) -> int:
    """What is to be compared of a task's documents, in order; last the note that it is there."""
    output, keys, signatures, before = Path(output), bytearray(), bytearray(), stamps(task)
    for found, _ in documents(task, options, {}, Steps(options.steps)):
        keys += key_of(found)
        if options.deduplicate == "near":
            signatures += options.near.signature(found)
    columns = {"keys": np.frombuffer(bytes(keys), "V16")}
    if options.deduplicate == "near":
        columns["bands"], columns["marks"] = options.near.columns(bytes(signatures))
    for name, column in columns.items():
        with files.written(_path(output, number, name)) as file:
            np.save(file, column)
    files.write_json(_note_path(output, number), [plan, before])
    return number


def _columns(output: Path, starts: np.ndarray, which: np.ndarray):
    """Keys of a band, and marks, of `which` documents; read as they are asked for."""
    tasks = range(len(starts) - 1)

    def band(number: int) -> np.ndarray:
        keys = [np.load(_path(output, task, "bands"), mmap_mode="r")[number] for task in tasks]
        return np.concatenate([np.zeros(0, "<u8"), *keys])[which]

    def marks(some: np.ndarray) -> np.ndarray:
        documents = which[some]
        order = np.argsort(documents, kind="stable")
        edges = np.searchsorted(documents[order], starts)
        found = [np.load(_path(output, task, "marks"), mmap_mode="r")[documents[order[a:b]] - starts[task]]
                 for task, a, b in zip(tasks, edges[:-1], edges[1:], strict=True) if a < b]
        table = np.concatenate(found)
        table[order] = table.copy()
        return table

    return band, marks


def _is_signed(output: Path, number: int, task: Task, plan: str) -> bool:
    try:
        return json.loads(_note_path(output, number).read_bytes()) == [plan, stamps(task)]
    except (OSError, ValueError):
        return False


def _note_path(output: Path, number: int) -> Path:
    return output / UNFINISHED / f"{number:05}.signed.json"


def _path(output: Path, number: int, name: str) -> Path:
    return output / UNFINISHED / f"{number:05}.{name}.npy"
