"""Checkpoints of a pytree on any mesh: a thin layer over Orbax that checks before it loads and keeps quiet.

On disk a checkpoint is `directory/STEP/` with a flat mapping from paths such as `params/layers/query` to arrays, and a
JSON `meta`. Tree structure (dataclasses, optax's tuples, None) is not stored: it comes from the state that is restored.
Orbax (a quarter of a second to import) is loaded at the first save or restore, or by Grain where a run reads data.
"""

import contextlib
import functools
import logging
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.errors import UserError


class Checkpoints:
    """The checkpoints of one run. In a multi-process run every process makes all calls, at the same steps."""

    def __init__(self, directory: str | Path, keep: int = 2):
        """Costs nothing: `directory` is made, and left-overs in it are cleaned up, when it is first used."""
        self._directory, self._keep = Path(directory).absolute(), keep

    def latest(self) -> int | None:
        """The newest complete step. (Orbax gives a checkpoint its numeric name in one rename, when it is complete.)"""
        try:
            names = [entry.name for entry in self._directory.iterdir() if entry.is_dir()]
        except OSError:  # not there, or not for us, which is told when it is written
            return None
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def save(self, step: int, state: Any, meta: dict[str, Any] | None = None) -> None:
        """Copy `state` off the devices and write it in the background; a step that exists is left as it is.

        The state may be donated at once. Waits if the save before is still being written, and raises if that failed.
        """
        ocp = _orbax()
        if step in self._manager.all_steps():
            return
        arrays = ocp.args.StandardSave(_flatten(state))
        # force: otherwise Orbax skips, without a word, a step that is below its latest.
        self._manager.save(step, args=ocp.args.Composite(state=arrays, meta=ocp.args.JsonSave(meta or {})), force=True)

    def restore(self, step: int, abstract_state: Any) -> Any:
        """The state at `step`, as `abstract_state` (a pytree of `jax.ShapeDtypeStruct`) describes and shards it.

        Raises:
            UserError: names the first path whose shape or dtype is another in the checkpoint (Orbax would cast it in
                silence), or says that the files cannot be read.
        """
        ocp = _orbax()
        wanted = _flatten(abstract_state)
        try:
            with _no_echoes():
                saved = self._manager.item_metadata(step).state
                if saved is None:
                    raise FileNotFoundError("it holds no state")
                self._compare(step, saved, wanted)
                arrays = ocp.args.StandardRestore(wanted)
                loaded = self._manager.restore(step, args=ocp.args.Composite(state=arrays))["state"]
        except UserError:
            raise
        except Exception as error:
            raise self._unreadable(step, error) from None
        return jax.tree.unflatten(jax.tree.structure(abstract_state), [loaded[path] for path in wanted])

    def meta(self, step: int) -> dict[str, Any]:
        """What was saved beside the state at `step`."""
        ocp = _orbax()
        try:
            return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        except Exception as error:
            raise self._unreadable(step, error) from None

    def writing(self) -> bool:
        """Whether what was saved last is still on its way to disk."""
        return "_manager" in self.__dict__ and self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Return when everything saved so far is complete on disk; raises if it could not be written."""
        if "_manager" in self.__dict__:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """`wait`, then release Orbax's threads."""
        if "_manager" in self.__dict__:
            self._manager.close()

    @functools.cached_property
    def _manager(self):
        ocp = _orbax()
        options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, cleanup_tmp_directories=True)
        handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            return ocp.CheckpointManager(self._directory, options=options, item_handlers=handlers)
        except OSError as error:
            raise UserError("--workdir", f"{self._directory} cannot be written ({error.strerror})",
                            "give a folder that can be") from None

    def _compare(self, step: int, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
        where = f"{self._directory / str(step)}"
        for path in [*wanted, *saved]:
            ours, theirs = (_describe(tree[path]) if path in tree else "missing" for tree in (wanted, saved))
            if ours != theirs:
                raise UserError(path, f"is {theirs} in the checkpoint {where} and {ours} in this run",
                                "build the model and optimizer of that checkpoint, or give another --workdir")

    def _unreadable(self, step: int, error: BaseException) -> UserError:
        folder = self._directory / str(step)
        if not folder.is_dir():
            return UserError("checkpoint", f"there is no {folder}", "see which steps that directory has")
        while error.__cause__ is not None:
            error = error.__cause__
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return UserError("checkpoint", f"{folder} cannot be read ({reason})",
                         "move it away, and the run resumes from the checkpoint before it")


def _orbax():
    """The package, muted below errors; its news would break up the progress line."""
    import orbax.checkpoint as ocp

    logger = logging.getLogger("absl")  # shared by all users of absl: silence a source, not the logger
    if _not_news not in logger.filters:
        logger.addFilter(_not_news)
    return ocp


def _not_news(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "orbax" not in record.pathname


@contextlib.contextmanager
def _no_echoes():
    """Mute the traceback that each array still being read prints when the reading of another one has failed."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda event: None if "Event loop is closed" in str(event.exc_value) else before(event)
    yield
    sys.unraisablehook = before  # not after an error: the echoes of one come later


def _flatten(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    assert len(flat) == len(leaves), "two leaves of the state have one path"
    return flat


def _describe(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
