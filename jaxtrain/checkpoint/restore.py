"""Load the state from a checkpoint in all processes, and compare it with the fingerprint that was saved."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxtrain.base.annotations import AnyArray, JsonMapping, PyTree
from jaxtrain.checkpoint import fingerprint, verify
from jaxtrain.checkpoint.orbax.orbax_logging import innermost, no_echoes, orbax
from jaxtrain.checkpoint.trees import describe, flatten, path_in
from jaxtrain.distributed import processes
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError

Extras = Mapping[str, Callable[[Any], Any]]


class Damaged(Exception):
    """Raised when a checkpoint does not hold what was saved."""


def load(folder: Path, abstract_state: PyTree, extras: Extras = MappingProxyType({})) -> PyTree:
    """Return the state in `folder`, as `abstract_state` describes and shards it; every process makes the call.

    Args:
        extras: for each entry of the state's `extras`, what makes it from the trained parameters, used if the
            checkpoint lacks the entry, or has it in other shapes, as what each part of a mesh remembers on another one.

    Raises:
        Damaged: in all processes, if one of them cannot read it or what they read is not what was saved.
        UserError: a shape or dtype differs; Orbax would cast it silently.
    """
    ocp, wanted = orbax(), flatten(abstract_state)
    loaded, sums, missing, new, problem = {}, {}, {}, set(), ""
    try:
        with no_echoes():
            reader = _reader()
            saved: Any = reader.metadata(folder).item_metadata
            if saved is None or saved.state is None:
                raise FileNotFoundError("it holds no state")
            tree = saved.state.tree
            wanted = {path_in(tree, path): leaf for path, leaf in wanted.items()}
            missing = {name: make for name, make in extras.items() if _entry(name, tree) != _entry(name, wanted)}
            new = {path for name in missing for part in (wanted, tree) for path in _entry(name, part)}
            there, known = ({path: leaf for path, leaf in part.items() if path not in new} for part in (wanted, tree))
            _compare(folder, known, there)
            arrays = ocp.args.PyTreeRestore(there, restore_args=ocp.checkpoint_utils.construct_restore_args(there),
                                            partial_restore=True)
            loaded = reader.restore(folder, args=ocp.args.Composite(state=arrays))["state"]
            sums = verify.saved_fingerprint(folder)
    except UserError:
        raise
    except Exception as error:
        if processes.broken(error):
            raise  # a process is lost, which says nothing about the checkpoint
        problem = innermost(error)
    if problem := exchange(problem, lambda all: next(filter(None, all), "")):
        raise Damaged(problem)
    if new:
        known_so_far = jax.tree.unflatten(jax.tree.structure(abstract_state), [loaded.get(path) for path in wanted])
        loaded |= _begun(missing, known_so_far.params, {path: wanted[path].sharding for path in new & wanted.keys()})
    flat = {path: loaded[path] for path in wanted}
    now = exchange(fingerprint.read(fingerprint.on_device(flat)), fingerprint.total)
    for path, found in now.items():
        if path not in new and sums.get(path, (None, None))[1] != found:
            raise Damaged(f"array {path} has other content than when it was saved")
    return jax.tree.unflatten(jax.tree.structure(abstract_state), list(flat.values()))


def find_good(workdir: str | Path, step: int | None = None) -> tuple[int, str] | None:
    """Return (step, fingerprint) of the newest checkpoint of a workdir that was read back and found good.

    Every process makes the call. `step`: look for this one only, and return None where it is not there or not good.

    Raises:
        UserError: there is none.
    """
    directory = Path(workdir).absolute() / "checkpoints"

    def look(_):
        there = verify.steps(directory)
        for each in reversed(there):
            if step in (None, each) and (record := verify.good(directory, each)):
                return [each, fingerprint_of(record)]
        if step is not None:
            return None
        raise UserError("checkpoint", f"of those in {directory} none was read back and found good" if there else
                        f"there is none in {directory}", "start that run again, which reads its newest one back"
                        if there else "give the workdir of a run that saved one")

    return (found[0], found[1]) if (found := exchange(None, look)) else None


def fingerprint_of(good: JsonMapping) -> str:
    """Return the hash of a checkpoint's parameters, from the content of its `good.json`."""
    arrays = {key: sums for key, sums in good["fingerprint"].items() if key.startswith(("params/", "frozen/"))}
    return hashlib.sha256(json.dumps(arrays, sort_keys=True).encode()).hexdigest()[:16]


def load_params(workdir: str | Path, abstract: PyTree, step: int, averaged: bool = False) -> PyTree:
    """Return the parameters of a checkpoint in a workdir, as `abstract` describes and shards them.

    Every process makes the call. Frozen parameters are included; a different dtype is cast.

    Args:
        averaged: those that were trained are their moving average.

    Raises:
        UserError: it lacks a parameter or has another shape, or its content is damaged; or it has no average.
    """
    folder, wanted = Path(workdir).absolute() / "checkpoints" / str(step), flatten(abstract)
    ocp, problem, named, loaded, sums = orbax(), "", {}, {}, {}
    try:
        with no_echoes():
            reader = _reader()
            metadata: Any = reader.metadata(folder).item_metadata
            saved = metadata.state.tree
            if averaged and not any(key.startswith("extras/ema/") for key in saved):
                raise UserError("--ema", f"{folder} has no average of the weights",
                                "leave it out, or train with train.ema_decay")
            for path, leaf in wanted.items():
                kinds = "extras/ema" if averaged else "params", "frozen"
                keys = (path_in(saved, f"{kind}/{path}") for kind in kinds)
                key = next((key for key in keys if key in saved), "")
                if not key or tuple(saved[key].shape) != tuple(leaf.shape) or (
                        np.issubdtype(saved[key].dtype, np.integer) != np.issubdtype(leaf.dtype, np.integer)):
                    there = describe(saved[key]) if key else "missing"
                    raise UserError(path, f"is {there} in the checkpoint {folder} and {describe(leaf)} in this model",
                                    "give the config with which it was trained")
                named[path] = key
            item = {key: jax.ShapeDtypeStruct(wanted[path].shape, saved[key].dtype, sharding=wanted[path].sharding)
                    for path, key in named.items()}
            restore_args = ocp.checkpoint_utils.construct_restore_args(item)
            loaded = reader.restore(folder, args=ocp.args.Composite(state=ocp.args.PyTreeRestore(
                item, restore_args=restore_args, partial_restore=True)))["state"]
            sums = verify.saved_fingerprint(folder)
    except UserError:
        raise
    except Exception as error:
        if processes.broken(error):
            raise
        problem = innermost(error)
    if problem := exchange(problem, lambda all: next(filter(None, all), "")):
        raise unreadable(folder, problem)
    now = exchange(fingerprint.read(fingerprint.on_device({key: loaded[key] for key in named.values()})),
                   fingerprint.total)
    if wrong := next((key for key, found in now.items() if sums.get(key, (None, None))[1] != found), None):
        raise unreadable(folder, f"array {wrong} has other content than when it was saved")
    leaves = [loaded[named[path]].astype(leaf.dtype) for path, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def _reader() -> Any:
    """Return Orbax's reader without its barrier, in which the others would wait for a process that cannot read."""
    ocp, me = orbax(), jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler(
        multiprocessing_options=alone)), multiprocessing_options=alone)


def _entry(name: str, tree: dict[str, PyTree]) -> dict[str, str]:
    """Return the arrays of an entry of a state's extras, by path."""
    return {path: describe(leaf) for path, leaf in tree.items() if path.split("/")[:2] == ["extras", name]}


def _compare(folder: Path, saved: dict[str, AnyArray], wanted: dict[str, AnyArray]) -> None:
    for path in [*wanted, *saved]:
        ours, theirs = (describe(tree[path]) if path in tree else "missing" for tree in (wanted, saved))
        if ours != theirs:
            raise UserError(path, f"is {theirs} in the checkpoint {folder} and {ours} in this run",
                            "build the model and optimizer of that checkpoint, or give another --workdir")


def _begun(extras: Extras, params: PyTree, where: dict[str, AnyArray]) -> dict[str, jax.Array]:
    """Return the arrays at these paths of entries that begin now, made from the parameters without communication."""
    def make(params):
        flat = flatten({"extras": {name: make(params) for name, make in extras.items()}})
        return {path: flat[path] for path in where}
    return jax.jit(make, out_shardings=where)(params)


def unreadable(folder: Path, reason: str) -> UserError:
    """Return the error for a checkpoint that the user asked for and that cannot be read."""
    if not folder.is_dir():
        return UserError("checkpoint", f"there is no {folder}", "see which steps that directory has")
    return UserError("checkpoint", f"{folder} cannot be read ({reason})",
                     "move it away, and the run resumes from the checkpoint before it")
