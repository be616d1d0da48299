"""Parse which devices a collective joins, from all notations of compiled programs, into tuples of ids."""

import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")


def device_groups(instruction: str, devices: int) -> Groups:
    """Return the device groups of one instruction; of a permutation, each (source, target)."""
    if match := _PAIRS.search(instruction) or _LISTED.search(instruction):
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", match[1])]
        return tuple(groups) or (tuple(range(devices)),)
    if match := _IOTA.search(instruction):  # [4,2]<=[2,4]T(1,0)
        return _rows(_iota(match[2], match[3]).reshape(_numbers(match[1])))
    if match := _MESH.search(instruction):  # mesh['data'=2,'stage'=4], device_ids=([4,2]T(1,0)) {'stage'}
        axes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        over = re.findall(r"'(\w+)'", match[4])
        assert len(over) == match[4].count(",") + 1 and ":" not in match[4], f"part of an axis: {instruction}"
        shape = tuple(map(int, axes.values()))
        ids = (_iota(match[2], match[3]) if match[2] else np.arange(math.prod(shape))).reshape(shape)
        names = list(axes)
        ids = np.moveaxis(ids, [names.index(axis) for axis in over], range(-len(over), 0))
        return _rows(ids.reshape(-1, math.prod(int(axes[axis]) for axis in over)))
    raise AssertionError(f"this parser does not know the notation of its devices: {instruction}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _iota(shape: str, order: str | None) -> np.ndarray:
    sizes = _numbers(shape)
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(_numbers(order) if order else range(len(sizes)))


def _rows(ids: np.ndarray) -> Groups:
    return tuple(map(tuple, ids.tolist()))
