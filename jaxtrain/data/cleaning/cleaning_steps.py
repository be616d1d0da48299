"""Run cleaning steps one after another; each returns the document, changed or not, or a reason to leave it out.

A step is a pure function. It may request other fields of the record with an attribute `fields`. New steps are created
for each task, so that even a step with internal state gives the same result for every task.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.cleaning import filters
from jaxtrain.data.cleaning.filters import Step
from jaxtrain.data.formats.inputs import Ids, Text, is_utf8
from jaxtrain.errors import UserError, nearest
from jaxtrain.files import atomic_files
from jaxtrain.observe.versions import version_of

FIX = f"name one of {', '.join(filters.STEPS)}, module:function or datatrove:CLASS(KEYWORD=VALUE)"


class Steps:
    """The cleaning steps that `names` describe, in order, with counts of what they changed and removed."""

    def __init__(self, names: Sequence[str], watch: Callable[[int, Text, Text | str], None] | None = None):
        self.steps = [(name, make(name)) for name in names]
        self.watch = watch  # called with every document that a step removes or changes
        self.counts: list[dict[str, Any]] = [{"step": shown(name), "seen": 0, "changed": 0, "removed": {}}
                                             for name in names]
        self.fields = tuple(sorted({field for _, step in self.steps for field in getattr(step, "fields", ())}))

    def __call__(self, document: Text | Ids) -> Text | Ids | str:
        """Return the document after all steps, or the reason why a step left it out."""
        if isinstance(document, Ids):
            if self.steps:
                raise UserError("--filters", f"{document.name} is already tokenised", "clean its text instead")
            return document
        for i, (name, step) in enumerate(self.steps):
            count, result = self.counts[i], _apply(name, step, document)
            count["seen"] += 1
            if isinstance(result, Text) and not result.content:
                result = "empty after the step"
            changed = isinstance(result, Text) and result.content != document.content
            if self.watch and (changed or isinstance(result, str)):
                self.watch(i, document, result)
            if isinstance(result, str):
                count["removed"][result] = count["removed"].get(result, 0) + 1
                return f"{count['step']}: {result}"
            count["changed"] += changed
            document = result
        return document


def summed(rows: Sequence[Sequence[JsonObject]]) -> list[JsonObject]:
    """Return the total counts of each step from the counts of all tasks."""
    return [{"step": counts[0]["step"]} | added({key: some[key] for key in ("seen", "changed")} for some in counts)
            | {"removed": added(some["removed"] for some in counts)} for counts in zip(*rows, strict=True)]


def added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Add up the counts of the same name."""
    result: dict[str, int] = {}
    for some in counts:
        for what, count in some.items():
            result[what] = result.get(what, 0) + count
    return result


def _apply(name: str, step: Step, document: Text) -> Text | str:
    try:
        result = step(document)
    except Exception as error:
        raise UserError("--filters", f"{shown(name)} failed on {document.name} ({type(error).__name__}: {error})",
                        "repair the step or leave it out") from error
    if not isinstance(result, Text | str) or result == "":
        raise UserError("--filters", f"{shown(name)} gave {result!r:.80} for {document.name}",
                        "let it return the document, or a text with the reason to drop it")
    if isinstance(result, Text) and result.content is not document.content and not _is_text(result.content):
        raise UserError("--filters", f"{shown(name)} gave {result.content!r:.80} as the content of {document.name}",
                        "let it be bytes of UTF-8")
    return result


def _is_text(content: object) -> bool:
    return isinstance(content, bytes) and is_utf8(content)


def make(name: str) -> Step:
    """Create the step that a command-line word names.

    A word is NAME, NAME=ARGUMENT, module:function or datatrove:CLASS(...).
    """
    word, equals, argument = name.partition("=")
    try:
        if name.startswith("datatrove:"):
            return filters.datatrove(name.partition(":")[2])
        found: Any = _find(word)
        if not equals and ":" in word and not isinstance(found, type):
            return found
        factory: Callable[..., Step] = found
        return factory(argument) if equals else factory()
    except UserError:
        raise
    except Exception as error:
        raise UserError("--filters", f"{shown(name)} cannot be made ({type(error).__name__}: {error})",
                        "give it the argument that it needs") from error


def _find(word: str) -> Any:
    module, colon, function = word.partition(":")
    if not colon:
        if word not in filters.STEPS:
            raise UserError("--filters", f"there is no step {word!r}", f"{nearest(word, filters.STEPS)}; or {FIX}")
        return filters.STEPS[word]
    try:
        found = getattr(_imported(module), function)
    except Exception as error:  # importing a module may fail in any way
        raise UserError("--filters", f"{word} cannot be imported ({type(error).__name__}: {error})", FIX) from error
    if not callable(found):
        raise UserError("--filters", f"{word} is not a function", FIX)
    return found


_IMPORTED: dict[str, tuple[Any, str | None]] = {}  # modules of steps, and the hashes of their files


def _imported(name: str) -> ModuleType:
    """Import a module, or reload it if its file has changed, so that the code that runs matches its recorded hash."""
    module = importlib.import_module(name)
    now = _code_digest(module)
    known, before = _IMPORTED.get(name, (module, now))
    _IMPORTED[name] = module, now
    return importlib.reload(module) if known is module and before != now else module


def _code_digest(module: ModuleType) -> str | None:
    file = getattr(module, "__file__", None)
    return atomic_files.file_digest(Path(file)) if file else None


def shown(name: str) -> str:
    """Return a step's name without the folder of a file in it, so that it does not depend on where the file is."""
    word, equals, argument = name.partition("=")
    return f"{word}{equals}{Path(argument).name}" if _is_file(name) else name


def identity(name: str) -> dict[str, str | None]:
    """Return what determines a step: its name, the hashes of its code and file, and the version of its library."""
    make(name)  # reports mistakes before any input is read
    return told(name)


def told(name: str) -> dict[str, str | None]:
    """Return the identity of a step that was already created."""
    step: dict[str, str | None] = {"step": shown(name)}
    word, _, argument = name.partition("=")
    is_plugin = ":" in word and not name.startswith("datatrove:")
    step["code"] = _code_digest(_imported(word.partition(":")[0]) if is_plugin else filters)
    if _is_file(name):
        step["file"] = atomic_files.file_digest(Path(argument).expanduser())
    package = "datatrove" if name.startswith("datatrove:") else filters.PACKAGES.get(word)
    return step | ({package: version_of(package)} if package else {})


def _is_file(name: str) -> bool:
    argument = name.partition("=")[2]
    return not name.startswith("datatrove:") and bool(argument) and Path(argument).expanduser().is_file()
