"""Sizes of mesh axes, and which devices an axis joins."""

import math
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import jaxtrain as jt
from jaxtrain.sharding.mesh import AXES, _ordered, axis_sizes, make_mesh, split_over_slices, with_auto_axes


def test_a_mesh_has_all_axes_and_is_explicit():
    mesh = jt.make_mesh(data=2, tensor=4)
    assert mesh.axis_names == AXES and dict(mesh.shape) == dict(data=2, fsdp=1, stage=1, context=1, expert=1, tensor=4)
    assert set(mesh.axis_types) == {AxisType.Explicit}
    assert set(with_auto_axes(mesh).axis_types) == {AxisType.Auto}


def test_one_axis_takes_what_is_left():
    assert jt.make_mesh(data=-1, tensor=2).shape["data"] == 4
    assert axis_sizes((-1, 2, 1, 1, 1, 4), 8) == (1, 2, 1, 1, 1, 4)


def test_fewer_devices_than_there_are():
    assert [d.id for d in jt.make_mesh(data=2).devices.flat] == [0, 1]
    chosen = jax.devices()[4:6]
    assert list(jt.make_mesh(data=2, devices=chosen).devices.flat) == chosen


@pytest.mark.parametrize(("keys", "words"), [
    (dict(data=-1, tensor=-1), "only one axis can be"),
    (dict(data=-1, tensor=3), "tensor=3 .*does not divide the 8 devices"),
    (dict(data=4, tensor=4), "needs 16 devices and there are 8"),
    (dict(data=2, devices=8), "needs 2 devices and there are 8"),
])
def test_sizes_that_do_not_fit_are_refused(keys, words):
    with pytest.raises(jt.UserError, match=words) as refusal:
        jt.make_mesh(**keys)
    assert refusal.value.key == "mesh"


def test_an_abstract_mesh_needs_no_devices():
    mesh = jt.make_mesh(data=16, fsdp=-1, tensor=8, devices=4096)
    assert isinstance(mesh, AbstractMesh) and mesh.shape["fsdp"] == 32 and set(mesh.axis_types) == {AxisType.Explicit}
    assert set(with_auto_axes(mesh).axis_types) == {AxisType.Auto}


def test_a_run_is_planned_for_more_devices_than_there_are():
    config = jt.make_config({"model": dict(vocab_size=64, num_layers=2, embed_dim=32, max_seq_len=16),
                             "mesh": dict(data=4, fsdp=4, tensor=4), "data": dict(seq_len=16, global_batch_size=32)})
    up = jt.build(config, devices=64).abstract.params["blocks"]["layer"]["mlp"]["up"]["kernel"]
    assert up.sharding.shard_shape(up.shape) == (2, 32 // 4, 128 // 4)


def test_tensor_joins_neighbours_and_data_the_most_distant():
    ids = np.vectorize(lambda d: d.id)(make_mesh(data=2, fsdp=2, tensor=2).devices).reshape(2, 2, 2)
    assert ids.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


# ---------------------------------------------------------------------------------------------------- slices and hosts

@pytest.mark.parametrize(("sizes", "islands", "between"), [
    ((4, 2, 1, 1, 1, 8), 4, (4, 1, 1, 1, 1, 1)),  # a slice for each data index
    ((2, 8, 1, 1, 1, 4), 4, (2, 2, 1, 1, 1, 1)),  # data first, then fsdp
    ((1, 1, 4, 1, 1, 8), 2, (1, 1, 2, 1, 1, 1)),  # pipeline stages across
    ((6, 1, 1, 1, 1, 4), 3, (3, 1, 1, 1, 1, 1)),
    ((8, 1, 1, 1, 1, 1), 1, (1, 1, 1, 1, 1, 1)),
])
def test_the_slow_axes_cross_between_islands(sizes, islands, between):
    assert split_over_slices(sizes, islands) == between
    assert math.prod(between) == islands


def test_axes_that_cannot_be_laid_over_the_islands_are_refused():
    with pytest.raises(jt.UserError, match="a factor of 3 remains"):
        split_over_slices((8, 1, 1, 1, 1, 2), 3)


@dataclass(frozen=True)
class Device:
    """A device with the attributes that laying out a mesh reads."""

    id: int
    process_index: int
    slice_index: int = 0
    platform: str = "tpu"
    device_kind: str = "none in particular"
    core_on_chip: int = 0

    @property
    def coords(self):
        """Each slice is a square of four."""
        return self.id % 2, self.id // 2 % 2, 0


@pytest.mark.parametrize(("kind", "island"), [
    ("tpu", lambda d: d.slice_index), ("gpu", lambda d: d.process_index)], ids=["slices", "hosts"])
def test_tensor_and_fsdp_stay_inside_an_island(kind, island):
    devices = [Device(i, i // 4 if kind == "gpu" else i // 2, i // 4 if kind == "tpu" else 0, kind) for i in range(8)]
    shuffled = [devices[i] for i in np.random.default_rng(0).permutation(8)]
    grid = _ordered((2, 2, 1, 1, 1, 2), shuffled).reshape(2, 4)
    for row in grid:
        assert len({island(device) for device in row}) == 1, f"fsdp x tensor crosses islands: {grid}"
    assert {island(row[0]) for row in grid} == {0, 1}, "data does not span the islands"
