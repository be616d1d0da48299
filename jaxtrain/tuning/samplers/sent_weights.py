"""Weights of a run as folders that a sampler on the same host, or with the same disk, loads: FOLDER/step-N.

They are written before the step that replaces them, and stay until no answer of theirs is outstanding: a run that was
killed asks for the answers that are missing by the weights that were to make them.
"""

import hashlib
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import read_json

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
    bytes: int


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

    def written(self, step: int, state: "TrainState") -> Weights:
        """Return the weights after this step, written if they are not yet. Every process makes the call."""
        if step not in self._known:
            import jax

            from jaxtrain.hub.export import make_folder

            jax.block_until_ready(state)
            began = time.perf_counter()
            partial = self.folder / f"step-{step}.partial"
            exchange(None, lambda _: make_folder(partial, "rl.sampler_folder"))
            try:
                self._save(state, partial)
            except OSError as error:
                raise UserError("rl.sampler_folder", f"{partial} cannot be written ({error.strerror or error})",
                                "make room, or name another") from None
            exchange(None)  # all files are written
            found = exchange(None, lambda _: _finished(partial, step))
            self._known[step] = Weights(step, found["version"], self._of(step), found["bytes"])
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
            self._known[step] = Weights(step, found["version"], self._of(step), found["bytes"])
        return self._known[step]

    def forget(self) -> None:
        """Forget what was written: the steps begin elsewhere."""
        self._known = {}

    def drop_before(self, step: int) -> None:
        """Delete the weights before this step, whose answers are all on record. The first process makes the call."""
        for path in self.folder.glob("step-*"):
            number = re.fullmatch(r"step-(\d+)", path.name)
            if number and int(number[1]) < step:
                shutil.rmtree(path, ignore_errors=True)

    def _of(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _save(self, state: "TrainState", folder: Path) -> None:
        from jaxtrain.train_step import partition

        config = self.run.config
        params = partition.without(state.all_params, self.run.objective.frozen_axes)
        dtype = np.dtype(_dtype_of(self.run.sharded.settings.precision))
        if sends_adapters(config):
            from jaxtrain.hub.adapters import adapter_files

            adapter_files.save(params, config.model, config.lora, folder, "", dtype)
        else:
            from jaxtrain.hub.weights import published_weights

            published_weights.save(params, config.model, folder, dtype, FILE_BYTES, config.lora)


def _dtype_of(precision: str) -> np.dtype:
    import ml_dtypes

    return np.dtype({"float32": np.float32, "float16": np.float16}.get(precision, ml_dtypes.bfloat16))


def _finished(partial: Path, step: int) -> dict:
    """Give a folder of weights its name, with a record of what it has; return that."""
    digest, size = hashlib.sha256(), 0
    for file in sorted(partial.iterdir()):
        digest.update(f"{file.name} {atomic_files.file_digest(file)}\n".encode())
        size += file.stat().st_size
    record = {"version": f"step-{step}-{digest.hexdigest()[:12]}", "bytes": size}
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
