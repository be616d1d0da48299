"""The arrays that a batch must have, and one sentence for a batch that has others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxtrain.base.annotations import AnyArray
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.errors import UserError

SEQ = "seq"  # the dimension that is the length of a batch's rows, which differs from bucket to bucket


@dataclass(frozen=True)
class Array:
    """One array of a batch, of which the rows come first: its dtype, and its further dimensions.

    Batches arrive whole along all but the rows; `parallel.cut_rows.arrange` then cuts `SEQ` over the mesh's `context`.
    """

    dtype: DTypeLike
    dims: tuple[str | int, ...] = (SEQ,)
    below: int = 0  # what its numbers are below; 0: anything

    @classmethod
    def of(cls, declared: Any) -> "Array":
        """Return it as an objective declares it: by itself, or by a dtype for an array of rows x tokens."""
        return declared if isinstance(declared, cls) else cls(declared)

    def shape(self, rows: int, length: int) -> tuple[int, ...]:
        """Return its shape in a batch of this many rows of this length."""
        return rows, *(length if size == SEQ else int(size) for size in self.dims)


Declared = Mapping[str, DTypeLike | Array]  # the arrays of a batch by name; a dtype alone is one of [rows, SEQ]


@dataclass(frozen=True)
class BatchSpec:
    """The name and dtype of each array of a batch, or what `Array` says of it, and where the dimensions are fixed."""

    dtypes: Declared
    whose: str  # who declares it, as a message names it
    same_shape: bool = True  # arrays have the declared shapes; False: each has dimensions of its own behind the first
    ndims: Mapping[str, int] | None = None
    below: Mapping[str, int] | None = None  # what the numbers of an array are below, where the host holds it

    @classmethod
    def like(cls, batch: Mapping[str, AnyArray], whose: str) -> "BatchSpec":
        """Return the spec of batches that have the arrays of this one."""
        if not isinstance(batch, Mapping) or not batch:
            raise UserError("batch", f"it is {_kind(batch)}", "give a dict from names to arrays")
        return cls({key: jnp.result_type(x) for key, x in batch.items()}, whose, False,
                   {key: np.ndim(x) for key, x in batch.items()})

    @property
    def arrays(self) -> dict[str, Array]:
        """Each array by name."""
        return {key: Array.of(declared) for key, declared in self.dtypes.items()}

    def abstract(self, rows: int, length: int,
                 where: Callable[[int], jax.sharding.NamedSharding]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes, dtypes and shardings of a batch; `where` is the sharding of this many dimensions."""
        return {key: jax.ShapeDtypeStruct(shape := array.shape(rows, length), array.dtype, sharding=where(len(shape)))
                for key, array in self.arrays.items()}

    def check(self, batch: Mapping[str, AnyArray]) -> tuple[int, ...]:
        """Refuse a batch that is not as declared; return its rows and their length, or its first array's shape."""
        if not isinstance(batch, Mapping):
            raise UserError("batch", f"it is {_kind(batch)}, and {self.whose} takes a dict of arrays",
                            f"give the arrays {', '.join(self.dtypes)} by name")
        if missing := [key for key in self.dtypes if key not in batch]:
            raise UserError("batch", f"it has no array {missing[0]!r}, which {self.whose} takes",
                            f"give the arrays {', '.join(self.dtypes)}")
        if extra := [key for key in batch if key not in self.dtypes]:
            raise UserError("batch", f"it has an array {extra[0]!r}, which {self.whose} does not take",
                            f"give the arrays {', '.join(self.dtypes)} and no others")
        arrays = self.arrays
        first = next((key for key, array in arrays.items() if array.dims == (SEQ,)), next(iter(arrays)))
        shape = np.shape(batch[first])
        for key, array in arrays.items():
            x = batch[key]
            if jnp.result_type(x) != (wanted := jnp.result_type(array.dtype)):
                raise UserError("batch", f"its array {key!r} is {jnp.result_type(x).name}, and {self.whose} takes "
                                f"{wanted.name}", f"convert it by .astype(np.{wanted.name})")
            plain = array.dims == (SEQ,)
            if self.same_shape and plain and (np.ndim(x) != 2 or np.shape(x) != shape):
                raise UserError("batch", f"its array {key!r} has the shape {_shape(x)}" + (
                    f" and {first!r} has {_shape(batch[first])}" if key != first else ""),
                    "give all arrays one shape of rows x tokens")
            if self.same_shape and not plain and np.shape(x) != (right := array.shape(*shape)):
                raise UserError("batch", f"its array {key!r} has the shape {_shape(x)}, and {self.whose} takes "
                                f"{' x '.join(map(str, right))}", "give it that shape")
            if array.below and isinstance(x, np.ndarray) and (beyond := (x < 0) | (x >= array.below)).any():
                raise UserError("batch", f"its array {key!r} has the number {x[beyond][0]}, and {self.whose} takes "
                                f"those below {array.below}", "raise that in the model's keys, or repair the data")
            if self.ndims and np.ndim(x) != self.ndims[key]:
                raise UserError("batch", f"its array {key!r} has the shape {_shape(x)}, and the batches before had "
                                f"{self.ndims[key]} dimensions", "give every batch the same ones")
            if self.below and key in self.below and isinstance(x, np.ndarray) and x.dtype.kind in "iu" and (
                    (bad := (x < 0) | (x >= self.below[key])) & self._counts(batch, key)).any():
                wrong = x[bad][0]
                raise UserError("batch", f"its array {key!r} has the token {wrong}, and model.vocab_size is "
                                f"{self.below[key]}", "raise model.vocab_size, or repair the data")
            if np.shape(x)[:1] != shape[:1]:
                raise UserError("batch", f"its array {key!r} has the shape {_shape(x)} and {first!r} has "
                                f"{_shape(batch[first])}", "make the example the first dimension of each")
        return shape

    def _counts(self, batch: Mapping[str, AnyArray], key: str) -> Any:
        """Whether a token matters: targets without weight may be any number, such as -100."""
        weights = batch.get("weights") if key == "targets" else None
        return weights != 0 if isinstance(weights, np.ndarray) and weights.shape == batch[key].shape else True


def row_of(batches: BatchSource, step: int) -> dict[str, np.ndarray]:
    """Return the first row of a step's batch, as a batch of its own: it tells what arrays there are."""
    return batches.rows(step, [0])


def first_steps(batches: BatchSource, start: int, stop: int) -> Sequence[int]:
    """Return, for each shape that the batches of steps `start` to `stop` have, the first step that has it."""
    wanted, found = set(map(tuple, batches.shapes_of(start, stop))), {}
    for step in range(start, stop):
        if len(found) == len(wanted):
            break
        found.setdefault(tuple(batches.shape(step)), step)
    return list(found.values())


def _shape(x: AnyArray) -> str:
    return " x ".join(map(str, np.shape(x))) or "of a single number"


def _kind(x: object) -> str:
    return "an empty dict" if isinstance(x, Mapping) else f"a {type(x).__name__}"
