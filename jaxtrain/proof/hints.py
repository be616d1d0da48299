"""Hints at the cause of a wrong number: factors that are sizes of axes, shards that are lost, norms of some shards."""

import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np
from jax.sharding import NamedSharding, Sharding

from jaxtrain.proof.drawn_layouts import Layout
from jaxtrain.proof.trial import GRADIENT, Quantities, named
from jaxtrain.run import Run

_CLOSE = 2e-3  # of ratios: far above rounding, and far below the distance of whole numbers
# What a layout of one device, or of axes over which only rows are split, says by itself.
_OF_OPTION = {
    "train.accumulation": "micro-batches of unequal weight count alike: a mean over the tokens of each is not the mean "
                          "over all; return a sum and its weight (jt.Weighted(total, weight))",
    "train.remat": "what is computed again for the backward pass is not what was computed before, such as random "
                   "numbers or an effect of the first call",
    "train.unroll": "the layers of an iteration of the scan are not computed as those of another",
    "train.loss_chunks": "the chunks of the loss do not add up to the whole",
    "optimizer.zero_stage": "the optimizer computes with a piece of each array where it needs all of it",
}
_OF_AXIS = {
    "data": "rows are split over it, and a mean over the tokens of one device is not the mean over all",
    "fsdp": "rows and parameters are split over it",
    "stage": "layers are split over it, and micro-batches pass through its stages",
    "context": "every sequence is split over it, and positions and masks are those of the whole sequence",
    "expert": "rows and experts are split over it", "tensor": "heads, MLPs and the vocabulary are split over it",
}


def proportion(got: np.ndarray, want: np.ndarray) -> float | None:
    """Return the factor by which all elements differ; None: there is no such factor."""
    got, want = np.asarray(got, np.float64).ravel(), np.asarray(want, np.float64).ravel()
    size = want @ want
    if not size or not np.isfinite(got).all():
        return None
    factor = float(got @ want / size)
    rest = np.linalg.norm(got - factor * want)
    return factor if rest <= _CLOSE * max(np.linalg.norm(got - want), abs(factor) * math.sqrt(size)) else None


def over(layout: Layout) -> str:
    """Return the words that name the axes of a layout."""
    names = " and ".join(f"`{axis}`" for axis in layout.sizes)
    return f" over {names}" if names else ""


def of_layout(layout: Layout) -> str:
    """Return what follows from the smallest layout that shows an error."""
    reasons = [_OF_OPTION[key] for key in layout.options if key in _OF_OPTION and not layout.sizes]
    reasons += [f"`{axis}`: {_OF_AXIS[axis]}" for axis in layout.sizes]
    return "; ".join(reasons) or "the numbers differ"


def of_array(got: np.ndarray, want: np.ndarray, sharding: Sharding | None, layout: Layout) -> str:
    """Return what an array that is off says, which is laid out so."""
    if got.shape != want.shape:
        return f"its shape is {list(got.shape)} in place of {list(want.shape)}; {of_layout(layout)}"
    if not np.isfinite(np.asarray(got, np.float64)).all() and np.isfinite(want).all():
        return f"it is not finite; {of_layout(layout)}"
    factor = proportion(got, want)
    if factor is not None and abs(factor - 1) > _CLOSE:
        return of_factor(factor, layout)
    return _of_shards(got, want, sharding, layout) or f"{_how_far(got, want)}; {of_layout(layout)}"


def of_factor(factor: float, layout: Layout) -> str:
    """Return what it means that a number is so many times what it should be."""
    if abs(factor) < 1e-9:
        return f"it is zero: nothing of it arrives{over(layout)}"
    for size, names in _products(layout):
        if abs(factor / size - 1) < _CLOSE:
            return (f"{factor:.4g} times what it should be, which is the size of {names}: summed over it once too "
                    "often (a psum of what is whole already), or counted once on each of its devices")
        if abs(factor * size - 1) < _CLOSE:
            return (f"1/{size} of what it should be, which is the size of {names}: not summed over it (a missing "
                    "psum), or divided by its size once too often")
    return f"{factor:.4g} times what it should be; {of_layout(layout)}"


def of_loss(got: float, want: float, layout: Layout) -> str:
    """Return what a wrong loss says."""
    if not math.isfinite(got):
        return f"it is {got}; {of_layout(layout)}"
    factor = got / want if want else math.inf
    if any(abs(factor * s - 1) < _CLOSE or abs(factor / s - 1) < _CLOSE for s, _ in _products(layout)):
        return of_factor(factor, layout)
    return f"{got:.6g} in place of {want:.6g}; {of_layout(layout)}"


def of_norm(got: float, gradient: Mapping[str, np.ndarray], run: Run, layout: Layout) -> str:
    """Return what a wrong norm of a right gradient says."""
    want = math.sqrt(sum(float((x**2).sum()) for x in gradient.values()))
    if not math.isfinite(got):
        return f"it is {got}, of a gradient that is right"
    times = f"{got / want if want else math.inf:.4g} times what it should be, of a gradient that is right"
    return times + (norm_of_what(got, gradient, run) or f"; {of_layout(layout)}")


def norm_of_what(got: float, gradient: Mapping[str, np.ndarray], run: Run) -> str:
    """Return of which gradients a norm is that, if these are found: of some shards, or of copies too."""
    shardings = dict(named(run.layout.gradients))
    for axis, size in ((axis, size) for axis, size in run.mesh.shape.items() if size > 1):
        split = {name for name in gradient if axis in _axes_of(shardings[name])}
        parts = {name: float((x**2).sum()) for name, x in gradient.items()}
        of_split, of_whole = (sum(x for name, x in parts.items() if (name in split) == is_split)
                              for is_split in (True, False))
        first = sum(float((next(_blocks(x, shardings[name], axis))[1] ** 2).sum())
                    for name, x in gradient.items() if name in split)
        for what, square in (
                (f": parameters that are not split over `{axis}` are counted once on each of its {size} devices",
                 of_split + size * of_whole),
                (f": all parameters are counted once on each of the {size} devices of `{axis}`",
                 size * (of_split + of_whole)),
                (f": it is that of the first shard over `{axis}` alone, not summed over it", first + of_whole),
                (f": parameters that are not split over `{axis}` are left out", of_split),
                (f": parameters that are split over `{axis}` are left out", of_whole)):
            if square and abs(got**2 / square - 1) < _CLOSE and of_split + of_whole != square:
                return what
    return ""


def of_clip(factor: float, run: Run, truth: Quantities, layout: Layout) -> str:
    """Return what it says that the gradient which the optimizer is given is off by a factor, after the norm was right.
    """
    gradient = {key.name: x for key, x in truth.items() if key.kind == GRADIENT}
    norm = math.sqrt(sum(float((x**2).sum()) for x in gradient.values()))
    clip = run.sharded.settings.clip_norm
    if clip and abs(min(1.0, clip / norm) * factor - 1) < _CLOSE:
        return f"the gradient is not clipped: its norm is {norm:.4g} and the limit {clip:.4g}"
    what = norm_of_what(norm / factor, gradient, run)  # an optimizer of one's own may clip itself
    return (f"the optimizer works on {factor:.4g} times the gradient that it should have, as if its norm were "
            f"{norm / factor:.4g} and not {norm:.4g}{what}" + f"; {of_layout(layout)}" * (not what))


def _how_far(got: np.ndarray, want: np.ndarray) -> str:
    scale = float(np.abs(want).max(initial=0))
    off = float(np.abs(np.asarray(got, np.float64) - want).max(initial=0))
    return f"off by {off / scale:.2g} of its largest element" if scale else f"off by {off:.2g} where it should be zero"


def _of_shards(got: np.ndarray, want: np.ndarray, sharding: Sharding | None, layout: Layout) -> str:
    """Return which shards over an axis are wrong, if others are right, or if each has a factor of its own."""
    if not isinstance(sharding, NamedSharding):
        return ""
    scale = float(np.abs(want).max(initial=0)) or 1.0
    for axis in (axis for axis in layout.sizes if axis in _axes_of(sharding)):
        pairs = [(a[1], b[1]) for a, b in zip(_blocks(got, sharding, axis), _blocks(want, sharding, axis), strict=True)]
        off = [float(np.abs(a - b).max(initial=0)) / scale for a, b in pairs]
        right = [n for n, error in enumerate(off) if error < 1e-3 * max(off)]
        if right:
            wrong = [n for n in range(len(off)) if n not in right]
            factor = proportion(*(np.concatenate([pairs[n][i].ravel() for n in wrong]) for i in (0, 1)))
            why = "" if factor is None else f": {of_factor(factor, layout)}"
            return (f"shard {', '.join(str(n + 1) for n in wrong)} of {len(off)} over `{axis}` is wrong and the others "
                    f"are right{why}")
    return ""


def _blocks(x: np.ndarray, sharding: NamedSharding, axis: str) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the parts of an array that the places along an axis of the mesh hold, whatever other axes split too."""
    x = np.asarray(x, np.float64)
    sizes = dict(sharding.mesh.shape)
    for dim, entry in enumerate(sharding.spec):
        names = (entry,) if isinstance(entry, str) else entry or ()
        if axis in names:
            before = math.prod(sizes[name] for name in names[:names.index(axis)])
            after = math.prod(sizes[name] for name in names[names.index(axis) + 1:])
            y = np.moveaxis(x, dim, 0)
            y = y.reshape(before, sizes[axis], after, y.shape[0] // (before * sizes[axis] * after), *y.shape[1:])
            for n in range(sizes[axis]):
                yield n, y[:, n]
            return


def _axes_of(sharding: Sharding | None) -> set[str]:
    return {name for entry in getattr(sharding, "spec", ()) for name in (
        (entry,) if isinstance(entry, str) else entry or ())}


def _products(layout: Layout) -> Iterator[tuple[int, str]]:
    """Yield the sizes that a factor may come from, with their names, the simplest first."""
    sizes = {f"`{axis}`": size for axis, size in layout.sizes.items()}
    if (parts := layout.keys.get("train.accumulation", 1)) > 1:
        sizes["train.accumulation"] = parts
    for many in range(1, len(sizes) + 1):
        for names in itertools.combinations(sizes, many):
            yield math.prod(sizes[name] for name in names), " x ".join(names)
