"""Weights of a run as folders that a sampler on the same host, or with the same disk, loads: FOLDER/step-N.

They are written before the step that replaces them, and stay until no answer of theirs is outstanding: a run that was
killed asks for the answers that are missing by the weights that were to make them.

Each folder is whole, and only what has changed is written: the files of tensors that are not trained are links to those
of the folder before, unless the run has just begun, was resumed or rolled back.
"""

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import read_json
from jaxtrain.hub.weights.safetensors_files import APART

if TYPE_CHECKING:
    from jaxtrain.config.schema import Config
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import TrainState

RECORD = "weights.json"
FILE_BYTES = 4 * 10**9  # of a file of several tensors


@dataclass(frozen=True)
class Weights:
    """The weights after a step, in a folder. `version`: the step, and a hash of the files."""

    step: int
    version: str
    folder: Path


def sends_adapters(config: "Config") -> bool:
    """Return whether a run trains nothing but adapters that a server can load, and sends them alone."""
    c = config.lora
    return bool(c.rank and not c.dora and not c.experts and not config.train.trainable)


@dataclass
class SentWeights:
    """The folders of a run's weights."""

    run: "Run"
    folder: Path
    written_s: float = 0.0  # the seconds and bytes of what was written last
    written_bytes: int = 0
    _known: dict[int, Weights] = field(default_factory=dict)
    _frozen: Path | None = None  # a folder with the files of tensors that are not trained

    def written(self, step: int, state: "TrainState") -> Weights:
        """Return the weights after this step, written if they are not yet. Every process makes the call."""
        if step not in self._known:
            import jax

            from jaxtrain.hub.export import make_folder

            jax.block_until_ready(state)
            began = time.perf_counter()
            partial = self.folder / f"step-{step}.partial"

            def begun() -> dict[str, str]:
                make_folder(partial, "rl.sampler_folder")
                return {} if self._frozen is None else _linked(self._frozen, partial)

            linked = exchange(None, lambda _: begun())
            try:
                self._save(state, partial, bool(linked))
            except OSError as error:
                raise UserError("rl.sampler_folder", f"{partial} cannot be written ({error.strerror or error})",
                                "make room, or name another") from None
            exchange(None)  # all files are written
            found = exchange(None, lambda _: _finished(partial, step, linked))
            self._known[step] = Weights(step, found["version"], self._of(step))
            self._frozen = self._of(step)
            self.written_s, self.written_bytes = time.perf_counter() - began, found["bytes"]
        return self._known[step]

    def is_known(self, step: int) -> bool:
        """Return whether the weights after this step need not be written any more."""
        return step in self._known

    def kept(self, step: int) -> Weights | None:
        """Return the weights that an earlier start of the run wrote after this step. Every process makes the call."""
        if step not in self._known:
            found = exchange(None, lambda _: _recorded(self._of(step)))
            if found is None:
                return None
            self._known[step] = Weights(step, found["version"], self._of(step))
        return self._known[step]

    def forget(self) -> None:
        """Forget what was written: the steps begin elsewhere."""
        self._known, self._frozen = {}, None

    def drop_before(self, step: int) -> None:
        """Delete the weights before this step, whose answers are all on record. The first process makes the call."""
        for path in self.folder.glob("step-*"):
            number = re.fullmatch(r"step-(\d+)", path.name)
            if number and int(number[1]) < step:
                shutil.rmtree(path, ignore_errors=True)

    def _of(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _save(self, state: "TrainState", folder: Path, linked: bool) -> None:
        """Write files. `linked`: the folder has those of tensors that are not trained."""
        from jaxtrain.train_step import partition

        config = self.run.config
        params = partition.without(state.all_params, self.run.objective.frozen_axes)
        dtype = np.dtype(_dtype_of(self.run.sharded.settings.precision))
        if sends_adapters(config):
            from jaxtrain.hub.adapters import adapter_files

            adapter_files.save(params, config.model, config.lora, folder, "", dtype)
        else:
            from jaxtrain.hub.weights import published_weights

            published_weights.save(params, config.model, folder, dtype, FILE_BYTES, config.lora, state.params, linked)


def _dtype_of(precision: str) -> np.dtype:
    import ml_dtypes

    return np.dtype({"float32": np.float32, "float16": np.float16}.get(precision, ml_dtypes.bfloat16))


def _linked(earlier: Path, folder: Path) -> dict[str, str]:
    """Link the files of tensors that are not trained; return their hashes, none where a file cannot be linked."""
    found = {name: digest for name, digest in files_of(earlier).items() if name.startswith(APART)}
    try:
        for name in found:
            os.link(earlier / name, folder / name)
    except OSError:  # somebody has deleted it, or the file system has no links
        for name in found:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
        return {}
    return found


def files_of(folder: Path) -> dict[str, str]:
    """Return the files of a folder of weights with their hashes; none of a folder that no run has written."""
    try:
        return read_json(folder / RECORD, {"files": {str: str}})["files"]
    except (OSError, ValueError):
        return {}


def _finished(partial: Path, step: int, linked: Mapping[str, str]) -> dict:
    """Give a folder of weights its name, with a record of what it has; return that.

    `linked`: files that were not written, with their hashes. `bytes` are those of the others.
    """
    files = {file.name: linked.get(file.name) or atomic_files.file_digest(file) for file in sorted(partial.iterdir())}
    digest = hashlib.sha256("".join(f"{name} {each}\n" for name, each in files.items()).encode())
    record = {"version": f"step-{step}-{digest.hexdigest()[:12]}", "files": files,
              "bytes": sum((partial / name).stat().st_size for name in files if name not in linked)}
    atomic_files.write_json(partial / RECORD, record)
    whole = partial.with_name(f"step-{step}")
    shutil.rmtree(whole, ignore_errors=True)
    partial.rename(whole)
    return record


def _recorded(folder: Path) -> dict | None:
    try:
        return read_json(folder / RECORD, {"version": str, "bytes": int})
    except (OSError, ValueError):
        return None
