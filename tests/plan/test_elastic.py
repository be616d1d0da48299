"""The mesh and the number of micro-batches for another number of devices."""

import itertools
import math

import pytest

from jaxtrain.config.load import make_config
from jaxtrain.errors import UserError
from jaxtrain.plan import elastic
from jaxtrain.sharding.mesh import AXES

TINY = {"model.num_layers": 2, "model.embed_dim": 48, "model.num_heads": 6, "model.vocab_size": 384,
        "data.seq_len": 48, "data.global_batch_size": 24}


def config(declared="", **keys):
    mesh = dict(part.split("=") for part in declared.split(",") if part)
    return make_config({}, {**TINY, **{f"mesh.{axis}": int(size) for axis, size in mesh.items()},
                            **{key.replace("__", "."): value for key, value in keys.items()}})


def mesh_of(config):
    return elastic.words(tuple(getattr(config.mesh, axis) for axis in AXES))


@pytest.mark.parametrize("declared, keys, devices, expected, accumulation", [
    ("data=4", {}, 4, "data=4", 1),
    ("data=4", {}, 3, "data=3", 2),
    ("data=4", {}, 2, "data=2", 2),
    ("data=4", {}, 1, "data=1", 4),
    ("data=4", {}, 8, "data=8", 1),  # grown: fewer rows a device
    ("data=4", {"train__accumulation": 2}, 2, "data=2", 4),
    ("data=4", {"train__accumulation": 2}, 3, "data=3", 4),  # 3 micro-batches of 8 rows do not divide over 3
    ("data=4", {"train__accumulation": 2}, 8, "data=8", 1),
    ("data=4,tensor=2", {}, 6, "data=3,tensor=2", 2),
    ("data=4,tensor=2", {}, 2, "tensor=2", 4),
    ("data=1,fsdp=4", {}, 3, "fsdp=3", 2),
    ("data=1,fsdp=4", {}, 2, "fsdp=2", 2),
    ("data=2,fsdp=4", {}, 4, "fsdp=4", 2),  # data shrinks first
    ("data=2,fsdp=4", {}, 6, "fsdp=6", 2),  # 4 does not divide 6: rather more shards than less room
    ("data=2,fsdp=2", {}, 3, "fsdp=3", 2),
    ("data=2,fsdp=2", {}, 8, "data=4,fsdp=2", 1),
    ("data=-1", {}, 3, "data=3", 1),  # of 3 devices, as far as anybody knows
    ("data=2,stage=2", {}, 2, "stage=2", 2),
    ("data=4", {"resilience__meshes": ["data=2,tensor=2", "tensor=3", "data=3"]}, 3, "tensor=3", 4),
    ("data=4", {"resilience__meshes": ["data=-1,tensor=2"]}, 2, "tensor=2", 4),
    ("data=4", {"resilience__meshes": ["tensor=4", "data=4"]}, 4, "data=4", 1),  # it fits as declared
])
def test_choice(declared, keys, devices, expected, accumulation):
    before = config(declared, **keys)
    chosen = elastic.choose(before, devices)
    expected = declared if "-1" in declared else expected  # as it stands in the config
    assert (mesh_of(chosen), chosen.train.accumulation) == (expected, accumulation)
    assert chosen.data == before.data and chosen.optimizer == before.optimizer


def test_the_rest_of_a_full_run():
    """The declared size of an axis of -1 is the one that it has when no process is lost."""
    chosen = elastic.choose(config("data=-1,tensor=2"), 4, full=8)
    assert (mesh_of(chosen), chosen.train.accumulation) == ("data=2,tensor=2", 2)
    assert elastic.choose(config("data=-1"), 4, full=4) == config("data=-1")


def test_a_mesh_that_is_decided_later():
    """Devices that no mesh can use are known all the same: 24 rows do not divide over 5, nor do 6 heads."""
    auto = make_config({}, {**TINY, "mesh": "auto"})
    assert elastic.choose(auto, 4, full=6) is auto
    with pytest.raises(UserError):
        elastic.choose(auto, 5, full=6)
    few = make_config({}, {**TINY, "mesh": "auto", "data.global_batch_size": 4})
    assert elastic.choose(few, 8, full=9) is few  # not over data alone


def test_no_more_rows_than_declared(monkeypatch):
    """No smaller accumulation would do, over many declared meshes and numbers of devices."""
    def divides(config, devices):
        if 24 % (devices * config.train.accumulation):
            raise UserError("data.global_batch_size", "it does not divide", "make it")

    monkeypatch.setattr(elastic, "_build", divides)
    tried = 0
    for data, fsdp, accumulation, devices in itertools.product((1, 2, 4), (1, 2), (1, 2), range(1, 9)):
        before = config(f"data={data},fsdp={fsdp}", train__accumulation=accumulation)
        try:
            chosen = elastic.choose(before, devices)
        except UserError:
            assert devices in (5, 7) or (devices == data * fsdp == 8 and accumulation == 2)
            continue
        tried += 1
        assert chosen.mesh.data * chosen.mesh.fsdp == devices
        if data * fsdp == devices:
            assert chosen is before
            continue
        parts = devices * chosen.train.accumulation
        assert 24 % parts == 0 and parts >= data * fsdp * accumulation
        assert not any(24 % (devices * fewer) == 0 and devices * fewer >= data * fsdp * accumulation
                       for fewer in range(1, chosen.train.accumulation))
    assert tried == 71


@pytest.mark.parametrize("declared, keys, devices, key, reason", [
    ("data=4", {}, 5, "mesh", "no substitute for data=4 fits 5 devices"),
    ("data=2,tensor=2", {}, 3, "mesh", "no substitute for data=2,tensor=2 fits 3 devices"),
    ("data=4", {"resilience__meshes": ["data=2"]}, 3, "resilience.meshes", "fits 3 devices"),
    ("data=4", {"resilience__meshes": ["tensor=5"]}, 5, "resilience.meshes", "does not divide over mesh axes"),
    ("data=2,tensor=4", {}, 8, "model.num_kv_heads", "does not divide over mesh axes"),  # nor does it as declared
])
def test_nothing_fits(declared, keys, devices, key, reason):
    with pytest.raises(UserError) as error:
        elastic.choose(config(declared, **keys), devices)
    assert error.value.key == key and reason in error.value.reason


@pytest.mark.parametrize("meshes", [["data=0"], ["rows=2"], ["data"], [""], [4], ["data=2,"]])
def test_meshes_that_are_none(meshes):
    with pytest.raises(UserError, match=r"resilience.meshes: .* is not a mesh"):
        config(resilience__meshes=meshes)


@pytest.mark.parametrize("text", ["data=4,tensor=2", "data=-1", "data=1", "fsdp=2,stage=3"])
def test_words(text):
    assert elastic.words(elastic.parse(text)) == text
    assert math.prod(elastic.parse("tensor=2")) == 2
