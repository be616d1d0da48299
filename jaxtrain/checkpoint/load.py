"""The state out of a checkpoint, loaded by all processes and compared with the fingerprint that it was saved with."""

from pathlib import Path
from typing import Any

import jax

from jaxtrain import distributed
from jaxtrain.checkpoint import fingerprint, verify
from jaxtrain.checkpoint.quiet import innermost, no_echoes, orbax
from jaxtrain.checkpoint.trees import describe, flatten, zeros_like
from jaxtrain.errors import UserError
from jaxtrain.exchange import exchange

YOUNG = ("history/",)  # parts of the state that older checkpoints lack: they start from zeros


class Damaged(Exception):
    """A checkpoint does not hold what was saved."""


def load(folder: Path, abstract_state: Any) -> Any:
    """The state in `folder`, as `abstract_state` describes and shards it; every process makes the call.

    Raises:
        Damaged: in all processes, if one of them cannot read it or what they read is not what was saved.
        UserError: a shape or dtype is another one there; Orbax would cast it in silence.
    """
    ocp, wanted = orbax(), flatten(abstract_state)
    loaded, sums, empty, problem = {}, {}, {}, ""
    try:
        with no_echoes():
            # Without the barrier in which the others would wait for one that cannot read.
            me = jax.process_index()
            alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
            reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler(state=ocp.StandardCheckpointHandler()),
                                      multiprocessing_options=alone)
            saved: Any = reader.metadata(folder).item_metadata
            if saved is None or saved.state is None:
                raise FileNotFoundError("it holds no state")
            empty = {path: zeros_like(leaf) for path, leaf in wanted.items()
                     if path.startswith(YOUNG) and path not in saved.state.tree}
            there = {path: leaf for path, leaf in wanted.items() if path not in empty}
            _compare(folder, saved.state.tree, there)
            arrays = ocp.args.StandardRestore(there)
            loaded = reader.restore(folder, args=ocp.args.Composite(state=arrays))["state"] | empty
            sums = verify.saved_fingerprint(folder)
    except UserError:
        raise
    except Exception as error:
        if distributed.broken(error):
            raise  # a process is gone: that says nothing about the checkpoint
        problem = innermost(error)
    if problem := exchange(problem, lambda all: next(filter(None, all), "")):
        raise Damaged(problem)
    flat = {path: loaded[path] for path in wanted}
    now = exchange(fingerprint.read(fingerprint.on_device(flat)), fingerprint.total)
    for path, found in now.items():
        if path not in empty and sums.get(path, (None, None))[1] != found:
            raise Damaged(f"array {path} has other content than when it was saved")
    return jax.tree.unflatten(jax.tree.structure(abstract_state), list(flat.values()))


def _compare(folder: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    for path in [*wanted, *saved]:
        ours, theirs = (describe(tree[path]) if path in tree else "missing" for tree in (wanted, saved))
        if ours != theirs:
            raise UserError(path, f"is {theirs} in the checkpoint {folder} and {ours} in this run",
                            "build the model and optimizer of that checkpoint, or give another --workdir")


def unreadable(folder: Path, reason: str) -> UserError:
    """What to say of a checkpoint that a person asked for and that cannot be read."""
    if not folder.is_dir():
        return UserError("checkpoint", f"there is no {folder}", "see which steps that directory has")
    return UserError("checkpoint", f"{folder} cannot be read ({reason})",
                     "move it away, and the run resumes from the checkpoint before it")
