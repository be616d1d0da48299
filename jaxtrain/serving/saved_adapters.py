"""The files of a training service: states of adapters in training, and adapters for samplers.

Each is a folder under the service's, OWNER/MODEL/weights/NAME or OWNER/MODEL/sampler_weights/NAME, with arrays in
safetensors and `about.json`, which is written last: without it the folder counts for nothing. A call is answered
after the files have been synced to disk.
"""

import contextlib
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxtrain.base.annotations import AnyArray, JsonObject
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files, bounded_files
from jaxtrain.hub.weights import safetensors_files
from jaxtrain.train_step.state import Params

TRAINING, SAMPLING = "weights", "sampler_weights"
ABOUT, ARRAYS = "about.json", "adapters.safetensors"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")
_FORM = {"rank": int, "alpha": int | float, "targets": [str], "experts": bool, "steps": int, "optimizer": bool,
         "base": str, "time": int | float}


@dataclass(frozen=True)
class Place:
    """A saved folder by the name that the API has for it, tinker://MODEL/KIND/NAME."""

    model: str
    kind: str
    name: str

    @classmethod
    def of(cls, path: object, key: str = "path") -> "Place":
        """Return the place that a path names; refuse anything else."""
        parts = path.removeprefix("tinker://").split("/") if isinstance(path, str) else []
        if (len(parts) != 3 or parts[1] not in (TRAINING, SAMPLING) or not f"{path}".startswith("tinker://")
                or not _MODEL.fullmatch(parts[0]) or not _NAME.fullmatch(parts[2])):
            raise UserError(key, f"{path!r} is not a saved state", f"give what save_state or save_weights_for_sampler "
                            f"returned, such as tinker://MODEL/{TRAINING}/NAME")
        return cls(*parts)

    def __str__(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"


class SavedAdapters:
    """The saved folders of one owner."""

    def __init__(self, folder: Path):
        self.folder = folder

    def _at(self, place: Place) -> Path:
        return self.folder / place.model / place.kind / place.name

    def check(self, place: Place, overwrite: bool) -> None:
        """Refuse to save where something is saved, or under a name that cannot be a file's."""
        if not _NAME.fullmatch(place.name) or place.name.startswith("."):
            raise UserError("path", f"{place.name!r} cannot be the name of a saved state",
                            "use letters, digits, dots, dashes and underscores, and at most 128 of them")
        if not overwrite and (self._at(place) / ABOUT).is_file():
            raise UserError("path", f"{place} is there already", "give another name, or overwrite=True")

    def save(self, place: Place, trees: Mapping[str, Params], about: JsonObject) -> None:
        """Write arrays by tree and path, and what is said of them; on return all is on disk."""
        folder = self._at(place)
        flat = {f"{name}/{path}": np.asarray(jax.device_get(leaf)) for name, tree in trees.items()
                for path, leaf in flatten(tree).items()}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            new = folder / f"{time.time_ns()}-{ARRAYS}"
            safetensors_files.write(new, {name: x.shape for name, x in flat.items()},
                                    {name: x.dtype for name, x in flat.items()}, iter(flat.values()))
            # One rename makes both count: the file says which arrays it is about.
            atomic_files.write_json(folder / ABOUT, {**about, "arrays": new.name, "time": time.time()})
            for above in (folder, *folder.parents):
                atomic_files.sync(above)
                if above == self.folder.parent:
                    break
            for old in set(folder.glob(f"*-{ARRAYS}")) - {new}:
                with contextlib.suppress(OSError):
                    old.unlink()
        except OSError as error:
            raise UserError("path", f"{place} cannot be saved ({error.strerror or error})",
                            "make room on the server's disk") from error

    def about(self, place: Place) -> JsonObject:
        """Return what is said of a saved folder; refuse one that is not there."""
        found = bounded_files.user_json(self._at(place) / ABOUT, _FORM, f"{place}", "save it again")
        if found is None:
            raise UserError("path", f"there is no {place}", "give the path of a state that was saved with the same key")
        return found

    def load(self, place: Place, like: Mapping[str, Params]) -> dict[str, Params]:
        """Return saved trees of arrays, placed as those that are given; refuse what has other shapes."""
        folder = self._at(place)
        tensors = safetensors_files.tensors_of(folder, self.about(place)["arrays"])
        found = {}
        for name, tree in like.items():
            def one(path: str, leaf: AnyArray, name: str = name) -> jax.Array:
                tensor = tensors.get(f"{name}/{path}")
                if tensor is None or tensor.shape != leaf.shape:
                    raise UserError("path", f"{place} has no {path} of shape {list(leaf.shape)}",
                                    "load what was saved of this model, with its rank")
                return jax.device_put(np.array(tensor.view()), leaf.sharding)
            leaves = [one(path, leaf) for path, leaf in flatten(tree).items()]
            found[name] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
        return found

    def all(self, model: str = "") -> Iterator[tuple[Place, JsonObject]]:
        """Yield all that is saved, of one model or of all, the newest first."""
        where = sorted(self.folder.glob(f"{model or '*'}/*/*/{ABOUT}"), key=lambda path: -path.stat().st_mtime)
        for path in where:
            place = Place(*path.parts[-4:-1])
            with contextlib.suppress(UserError):
                yield place, self.about(place)

    def size(self, place: Place) -> int:
        """Return the bytes on disk."""
        return sum(path.stat().st_size for path in self._at(place).iterdir())

    def delete(self, place: Place) -> None:
        """Delete a saved folder."""
        self.about(place)
        (self._at(place) / ABOUT).unlink()
        shutil.rmtree(self._at(place), ignore_errors=True)
