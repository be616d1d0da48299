"""Find which documents are duplicates of earlier ones, before anything is tokenised.

Each task writes what is compared of its documents, once. Then this process compares all of them, in the order of the
input, in some 60 bytes of memory per document, however many bands there are.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from jaxtrain.data.cleaning.cleaning_steps import Steps
from jaxtrain.data.corpus.corpus import UNFINISHED
from jaxtrain.data.formats.conversations import Example
from jaxtrain.data.formats.inputs import Ids, Text, stamps
from jaxtrain.data.prepare import cleaned_store, engines
from jaxtrain.data.prepare.engines import Engine
from jaxtrain.data.prepare.prepare_progress import Progress
from jaxtrain.data.prepare.tasks import Options, Task, chat_of, documents, key_of, made_by, verdicts_path
from jaxtrain.files import atomic_files


def find_duplicates(tasks: Sequence[Task], output: Path, options: Options, plan: str, workers: int | Engine,
                    say: Callable[[str], None] = lambda line: None) -> None:
    """Record which documents of each task duplicate an earlier one, in the order of the input."""
    sign_documents(tasks, range(len(tasks)), output, options, plan, workers, say)
    keys = [np.load(_path(output, number, "keys"), mmap_mode="r") for number in range(len(tasks))]
    starts = np.cumsum([0, *map(len, keys)])
    verdicts, _, _ = compared(options, keys, partial(_columns, output, starts))
    for number, some in enumerate(np.split(verdicts, starts[1:-1])):
        with atomic_files.written(verdicts_path(output, number)) as file:
            np.save(file, some)


def compared(options: Options, keys: Sequence[np.ndarray], columns: Callable[[np.ndarray], tuple[Callable, Callable]],
             ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return verdicts (indices of tasks.ALIKE), distinct documents, and the first one that each of them resembles."""
    different = _different(keys)
    verdicts = np.ones(sum(map(len, keys)), np.uint8)
    verdicts[different] = 0
    first = np.arange(len(different))
    if options.deduplicate == "near":
        first = options.near.firsts(len(different), *columns(different))
        verdicts[different[first != np.arange(len(first))]] = 2
    return verdicts, different, first


def signature(document: Text | Ids, options: Options) -> bytes:
    """Return the near-duplicate signature of a document; of a conversation it covers what user and assistant say."""
    if isinstance(document, Text) and options.format != "text":
        document = replace(document, content=Example.from_bytes(document.content).spoken().encode())
    return options.near.signature(document)


def sign_documents(tasks: Sequence[Task], numbers: Sequence[int], output: Path, options: Options, plan: str,
                   workers: int | Engine, say: Callable[[str], None]) -> None:
    """Run `sign_task` for those of the tasks that are not signed yet."""
    missing = [number for number in numbers if cleaned_store.read_note(output, number, tasks[number], plan) is None]
    progress = Progress("duplicates", tasks, numbers, missing, say, workers)
    for number in engines.run(sign_task, tasks, missing, output, options, plan, workers):
        progress.add(number)


def _different(keys: Sequence[np.ndarray]) -> np.ndarray:
    """Return the indices of the first document of each key, in order."""
    head, tail = (np.concatenate([np.zeros(0, "<u8"), *(some.view("<u8").reshape(-1, 2)[:, half] for some in keys)])
                  for half in (0, 1))
    order = np.lexsort((tail, head))  # stable: equal documents stay in the order of the input
    head, tail = head[order], tail[order]
    is_first = np.append(True, (head[1:] != head[:-1]) | (tail[1:] != tail[:-1]))[: len(order)]
    return np.sort(order[is_first])


def sign_task(number: int, task: Task, output: str | Path, options: Options, plan: str) -> int:
    """Write what is compared of a task's documents, in order, and last the note that it is complete."""
    output, keys, signatures, left_out = Path(output), bytearray(), bytearray(), {}
    note = {"plan": plan, "stamps": stamps(task), "left_out": left_out}
    steps, chat = Steps(options.steps), chat_of(options)
    note["by"] = made_by(options, chat)
    with cleaned_store.written(output, number) as keep:
        for found, origin in documents(task, options, left_out, steps, chat):
            keys += key_of(found)
            if options.deduplicate == "near":
                signatures += signature(found, options)
            if options.steps and isinstance(found, Text):
                keep(found, origin)
    columns = {"keys": np.frombuffer(bytes(keys), "V16")}
    if options.deduplicate == "near":
        columns["bands"], columns["marks"] = options.near.columns(bytes(signatures))
    for name, column in columns.items():
        with atomic_files.written(_path(output, number, name)) as file:
            np.save(file, column)
    cleaned_store.write_note(output, number, note | {"steps": steps.counts})
    return number


def _columns(output: Path, starts: np.ndarray, which: np.ndarray):
    """Return functions that read the keys of a band and the marks of `which` documents on demand."""
    tasks = range(len(starts) - 1)
    places = np.searchsorted(which, starts)

    def band(number: int) -> np.ndarray:
        keys = np.empty(len(which), "<u8")
        for task, a, b in zip(tasks, places[:-1], places[1:], strict=True):
            keys[a:b] = np.load(_path(output, task, "bands"), mmap_mode="r")[number][which[a:b] - starts[task]]
        return keys

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


def _path(output: Path, number: int, name: str) -> Path:
    return output / UNFINISHED / f"{number:05}.{name}.npy"
