"""Drawings of a mesh, and of which devices hold which part of an array."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxtrain.pages import grid_svg
from jaxtrain.pages.notebook_drawing import Cell, Drawing, Grid
from jaxtrain.pages.page_parts import facts, fragment, html_table
from jaxtrain.sharding.axis_rules import AnyMesh, SpecEntry

MOST, WIDE = 512, 16  # cells that are drawn, the others are counted; and those of a row where there is one axis
Part = tuple[tuple[int, int], ...]  # where it begins and ends in each dimension


def of_mesh(mesh: AnyMesh) -> Drawing:
    """Draw the devices by their places on the axes: the last axis to the right, the one before it downwards."""
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    names = " x ".join(f"{axis}={size}" for axis, size in sizes.items()) or "one device"
    devices = _numbers(mesh)
    several = isinstance(mesh, Mesh) and len({device.process_index for device in mesh.devices.flat}) > 1
    processes = [device.process_index for device in mesh.devices.flat] if several else [0] * len(devices)
    first = max(1, len(devices) // next(iter(sizes.values()), 1))  # devices that are at one place of the first axis
    cells = [Cell(f"{device}", f"process {process}" if several else "", process if several else number // first)
             for number, (device, process) in enumerate(zip(devices, processes, strict=True))]
    axes = {axis: [f"{axis} {i}" for i in range(size)] for axis, size in sizes.items()}
    return _figure(f"Mesh: {names}", _drawn(axes, cells), f"mesh: {names}; devices {_listed(devices)}")


def of_placement(mesh: AnyMesh, said: Mapping[str, str], head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return what is said of a run, its mesh, and a table of its parameters, for a cell of a notebook."""
    return fragment([facts({name: text for name, text in said.items() if text}), of_mesh(mesh).html,
                     html_table(head, rows, len(head) - 1)])


def of_array(array: jax.Array | jax.ShapeDtypeStruct, names: Sequence[str | None] = ()) -> Drawing:
    """Draw which devices hold which part of an array, or of its shape with a sharding; `names`: of its dimensions."""
    held = _held(array)
    ranges = [sorted({part[i] for part in held}) for i in range(len(array.shape))]
    size, whole = math.prod(array.shape) * array.dtype.itemsize, len(held) == 1
    each = size // math.prod(len(parts) for parts in ranges)
    copies = sum(map(len, held.values())) // len(held)
    told = [f"{np.dtype(array.dtype).name}[{', '.join(map(str, array.shape))}], {size:,} bytes"]
    told += ["whole on every device" if whole else f"{each:,} bytes a device in {len(held)} parts"]
    told += [f"{copies} copies of each"] if copies > 1 and not whole else []
    told += [f"{_name(i, names)} over {axes}" for i, axes in _axes(array.sharding)]
    title = "; ".join(told)
    split = {_name(i, names): [f"{_name(i, names)} {low}:{high}" for low, high in parts]
             for i, parts in enumerate(ranges) if len(parts) > 1}
    cells = [Cell(_listed(devices), f"{each:,} B", number) for number, devices in enumerate(held.values())]
    lines = [f"[{', '.join(f'{low}:{high}' for low, high in part)}] on {_listed(devices)}"
             for part, devices in itertools.islice(held.items(), MOST)]
    return _figure(title, _drawn(split, cells), "\n".join([title, *lines]))


def _held(array: jax.Array | jax.ShapeDtypeStruct) -> dict[Part, list[int]]:
    """Return the parts of an array, in order, with the devices that hold each."""
    found: dict[Part, list[int]] = {}
    for device, part in _parts(array):
        found.setdefault(part, []).append(device)
    return dict(sorted(found.items()))


def _parts(array: jax.Array | jax.ShapeDtypeStruct) -> Iterator[tuple[int, Part]]:
    """Yield each device with its part; devices of an abstract mesh are numbered along it."""
    shape, sharding = array.shape, array.sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        sizes = sharding.mesh.shape
        for number, place in enumerate(itertools.product(*map(range, sizes.values()))):
            at = dict(zip(sizes, place, strict=True))
            entries = [*map(_entry, sharding.spec), *[()] * (len(shape) - len(sharding.spec))]
            yield number, tuple(_range(size, entry, at, sizes) for size, entry in zip(shape, entries, strict=True))
        return
    for device, index in sharding.devices_indices_map(shape).items():
        yield device.id, tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))


def _range(size: int, axes: Sequence[str], at: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the part of a dimension at a place of the mesh: the first of its axes has the longest stride."""
    number, count = 0, 1
    for axis in axes:
        number, count = number * sizes[axis] + at[axis], count * sizes[axis]
    return size * number // count, size * (number + 1) // count


def _entry(entry: SpecEntry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _axes(sharding: jax.sharding.Sharding) -> Iterator[tuple[int, str]]:
    """Yield the dimensions that are split, with the mesh axes over which they are."""
    if isinstance(sharding, NamedSharding):
        for i, entry in enumerate(sharding.spec):
            if axes := [axis for axis in _entry(entry) if sharding.mesh.shape[axis] > 1]:
                yield i, "+".join(axes)


def _drawn(axes: Mapping[str, Sequence[str]], cells: Sequence[Cell]) -> Iterator[Grid | str]:
    """Yield a grid for each place on all but the last two axes, as far as there is room, and how many are left out."""
    labels = [*axes.values()]
    if len(labels) < 2:  # a row, or several below each other where it is long
        names, wide = (labels or [[""]])[0], WIDE
        yield Grid("", [f"+{i}" if i else "" for i in range(min(wide, len(names)))] if len(names) > wide else names, [
            (names[i] if len(names) > wide else "", cells[i:i + wide])
            for i in range(0, min(len(names), MOST), wide)])
        if len(names) > MOST:
            yield f"and {len(names) - MOST:,} more"
        return
    *others, rows, columns = labels
    size = len(rows) * len(columns)
    shown, wide = max(1, MOST // size), len(columns[:MOST])
    high = len(rows[:max(1, MOST // wide)])
    for number, place in enumerate(itertools.islice(itertools.product(*others), shown)):
        own = cells[number * size:(number + 1) * size]
        yield Grid(", ".join(place), columns[:wide], [(name, own[i * len(columns):i * len(columns) + wide])
                                                      for i, name in enumerate(rows[:high])])
    if len(cells) > (drawn := min(shown, len(cells) // size) * high * wide):
        yield f"and {len(cells) - drawn:,} more"


def _figure(title: str, grids: Iterable[Grid | str], text: str) -> Drawing:
    shown = [*grids]
    html = (one.html() if isinstance(one, Grid) else f"<p>{one}</p>" for one in shown)
    return Drawing("\n".join([f"<figure><figcaption>{escape(title)}</figcaption>", *html, "</figure>"]), text,
                   functools.partial(grid_svg.drawn, title, shown))


def _name(i: int, names: Sequence[str | None]) -> str:
    return f"{names[i]}" if i < len(names) and names[i] is not None else f"dimension {i}"


def _numbers(mesh: AnyMesh) -> list[int]:
    return [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else [*range(mesh.size)]


def _listed(numbers: Sequence[int]) -> str:
    """Write numbers with what follows each other as one: 0-3, 8."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    said = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in found]
    return ", ".join(said[:6]) + (f" and others, {len(numbers)} in all" if len(said) > 6 else "")
