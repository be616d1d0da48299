"""The second copy: whole or not there, sent in spite of the network, and gone on from when the first is lost."""

import contextlib
import hashlib
import os
import shutil
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain import storage
from jaxtrain.checkpoint import CheckpointManager, mirror, verify
from jaxtrain.checkpoint.mirror import Mirror
from jaxtrain.errors import UserError
from jaxtrain.observe.events import events
from tests.odd_files import ODD, WRONG, in_time

HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
ABSTRACT = {"w": jax.ShapeDtypeStruct((64, 8), np.float32, sharding=HERE)}


def state_of(step):
    return {"w": jax.numpy.arange(512.0).reshape(64, 8) + step}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run's checkpoints of steps 1 to 3, all good."""
    work = tmp_path_factory.mktemp("made") / "work"
    work.mkdir()
    with contextlib.closing(CheckpointManager(work / "checkpoints", keep=9)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(step), {"step": step, "config": {"train": {"steps": 3}}})
        checkpoints.wait()
    return work


@pytest.fixture
def work(made, tmp_path):
    shutil.copytree(made, tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(mirror, "PAUSE", (0.01, 0.1))


@pytest.fixture(params=["path", pytest.param("s3", marks=pytest.mark.slow)])
def place(request, tmp_path):
    return str(tmp_path / "second" / "copy") if request.param == "path" else (
        f"{request.getfixturevalue('bucket')}/runs/a")


def kinds(work):
    return [event["kind"] for event in events(work)]


def same(work, other, step):
    one, two = ({path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}
                for place in (Path(work, "checkpoints", str(step)), Path(other, "checkpoints", str(step))))
    return one == two


def restored(work, place, step):
    with contextlib.closing(CheckpointManager(work / "checkpoints", mirror=place)) as checkpoints:
        found, state, meta = checkpoints.restore_newest(ABSTRACT)
    assert found == meta["step"] == step
    np.testing.assert_array_equal(np.asarray(state["w"]), np.asarray(state_of(step)["w"]))


def test_there_and_back(work, made, place):
    ours = Mirror(work / "checkpoints", place)
    assert ours.steps() == [] and ours.fetch() is None
    assert ours.send(2) > 3 and ours.send(2) == 0 and ours.send(3) > 3
    assert ours.steps() == [2, 3] and ours.good(3) == verify.good(work / "checkpoints", 3)
    shutil.rmtree(work / "checkpoints")
    assert ours.fetch(2) == 2 and ours.fetch() == 3 and ours.fetch(7) is None
    assert same(work, made, 2) and same(work, made, 3)
    assert verify.verify(work / "checkpoints", 3) == []


def test_a_run_copies_as_it_goes_and_keeps_as_many(tmp_path, place):
    work = tmp_path / "work"
    with contextlib.closing(CheckpointManager(work / "checkpoints", keep=2, keep_every=3, mirror=place)) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, state_of(step), {"step": step})
            checkpoints.wait()
    assert Mirror(work / "checkpoints", place).steps() == verify.steps(work / "checkpoints") == [3, 4, 5]
    shutil.rmtree(work)
    restored(work, place, 5)


def test_a_damaged_one_comes_back_whole(work, made, place):
    Mirror(work / "checkpoints", place).send(3)
    next((work / "checkpoints" / "3").rglob("d/*")).write_bytes(b"nonsense")
    restored(work, place, 3)
    assert same(work, made, 3) and (work / "checkpoints" / "3.damaged").is_dir()


@pytest.mark.parametrize("name", ["../../../planted", "{}/planted"])
def test_a_copy_writes_nothing_outside_its_folder(work, tmp_path, name):
    """Whoever can write to the mirror names other files in good.json, seals it, and puts the content there."""
    place = str(tmp_path / "second" / "place" / "copy")
    ours = Mirror(work / "checkpoints", place)
    ours.send(2), ours.send(3)
    name = name.format(tmp_path)
    record = verify.read_mark(work / "checkpoints", 3)
    record["files"][name] = (3, hashlib.sha256(b"bad").hexdigest())
    sealed = tmp_path / "sealed"
    sealed.write_bytes(verify._sealed({key: value for key, value in record.items() if key != "sha256"}))
    storage.put(sealed, storage.join(ours.place, f"3/{verify.MARK}"))
    (there := Path(place, "3", name.lstrip("/"))).parent.mkdir(parents=True, exist_ok=True)
    there.write_bytes(b"bad")
    shutil.rmtree(work / "checkpoints")
    assert ours.fetch() == 2
    assert not [path for path in tmp_path.rglob("planted") if "second" not in path.parts]


def test_a_copy_with_further_files_is_not_taken(work, place):
    ours = Mirror(work / "checkpoints", place)
    ours.send(3)
    shutil.rmtree(work / "checkpoints")
    fetching = work / "checkpoints" / f"3{mirror.FETCHING}"
    fetching.mkdir(parents=True)
    (fetching / "left over").touch()
    assert ours.fetch() == 3 and verify.verify(work / "checkpoints", 3) == []


def test_a_copy_that_grew_is_not_fetched(work, tmp_path):
    """Nothing is written of a sparse file of a terabyte."""
    place = str(tmp_path / "place")
    ours = Mirror(work / "checkpoints", place)
    ours.send(2), ours.send(3)
    grown = next(Path(place, "3").rglob("d/*"))
    os.truncate(grown, 2**40)
    shutil.rmtree(work / "checkpoints")
    with pytest.raises(UserError, match=rf"{grown.name}: has 1,099,511,627,776 bytes, and good.json says [0-9]+"):
        ours.fetch(3)
    assert ours.fetch(2) == 2


def test_one_that_the_mirror_lacks_is_passed_over(work, place):
    Mirror(work / "checkpoints", place).send(1)
    next((work / "checkpoints" / "3").rglob("d/*")).write_bytes(b"nonsense")
    restored(work, place, 2)


def test_what_ended_too_early_is_copied_at_the_next_start(work, place):
    restored(work, place, 3)
    with contextlib.closing(CheckpointManager(work / "checkpoints", mirror=place)) as checkpoints:
        assert checkpoints.newest() == 3 and checkpoints._mirror._thread is None  # it may be another run's
        assert checkpoints.restore_newest(ABSTRACT)[0] == 3
        checkpoints.wait()
    assert Mirror(work / "checkpoints", place).steps() == [3]


def test_later_steps_of_a_past_that_was_left(work, place):
    for step in (1, 2, 3):
        Mirror(work / "checkpoints", place).send(step)
    Mirror(work / "checkpoints", place, kept=lambda good: good[-2:]).send(2)
    assert Mirror(work / "checkpoints", place).steps() == [1, 2, 3]  # it was there: nothing to do
    with contextlib.closing(CheckpointManager(work / "checkpoints", keep=9)) as checkpoints:
        assert checkpoints.restore_newest(ABSTRACT, below=2)[0] == 1
        checkpoints.save(2, state_of(7), {"step": 2})
        checkpoints.wait()
    Mirror(work / "checkpoints", place, kept=lambda good: good[-2:]).send(2)
    assert Mirror(work / "checkpoints", place).steps() == [1, 2]


def test_another_runs_place_is_refused(work, tmp_path, place):
    Mirror(work / "checkpoints", place).send(3)
    shutil.copytree(work, tmp_path / "other")
    (tmp_path / "other" / "checkpoints" / "mirror-owner.json").write_text('{"run": "b"}')
    with pytest.raises(UserError, match=r"checkpoint\.mirror: .* holds copies of another run"):
        Mirror(tmp_path / "other" / "checkpoints", place).send(3)
    with pytest.raises(UserError, match="holds copies of another run"):
        Mirror(tmp_path / "other" / "checkpoints", place).hide(1)
    (tmp_path / "other" / "checkpoints" / "mirror-owner.json").unlink()  # one that has never had a mirror
    with pytest.raises(UserError, match="holds copies of another run"):
        Mirror(tmp_path / "other" / "checkpoints", place).send(3)
    assert Mirror(work / "checkpoints", place).steps() == [3]


def test_the_config_comes_along(work, place):
    Mirror(work / "checkpoints", place).send(3)
    shutil.rmtree(work)
    work.mkdir()
    Mirror(work / "checkpoints", place).fetch()
    assert '"steps": 3' in (work / "config.json").read_text()


# ---------------------------------------------------------------------------------------------------- a bad network
@pytest.mark.slow
def test_good_json_is_last_and_half_a_copy_is_gone_on_with(network, bucket, work):
    ours = Mirror(work / "checkpoints", f"{bucket}/a")
    ours.send(2)
    network.calm()
    network.fault = lambda number, method, path: "forbidden" if method == "PUT" and "/d/" in path else ""
    with pytest.raises(UserError, match="cannot be written"):
        ours.send(3)
    assert ours.steps() == [2] and not any(request.endswith("/3/good.json") for request in network.requests
                                           if request.startswith("PUT"))
    sent = {request for request in network.requests if request.startswith("PUT") and "/d/" not in request}
    network.calm()
    ours.send(3)
    again = {request for request in network.requests if request.startswith("PUT")}
    assert sent and not sent & again and ours.steps() == [2, 3]


@pytest.mark.slow
def test_a_bad_network_changes_nothing(network, bucket, work, made):
    ours = Mirror(work / "checkpoints", f"{bucket}/a")
    network.shake(1, faults=["error", "busy", "reset"], methods=("PUT", "HEAD", "GET"))
    ours.send(3)
    shutil.rmtree(work / "checkpoints" / "3")
    ours.fetch(3)
    assert len(network.faults) > 5 and same(work, made, 3)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["flipped", "short"])
def test_bytes_that_change_on_the_way_are_not_taken(network, bucket, work, made, fault):
    ours = Mirror(work / "checkpoints", f"{bucket}/a")
    ours.send(3)
    shutil.rmtree(work / "checkpoints" / "3")
    seen = set()

    def once(number, method, path):
        first = method == "GET" and "/d/" in path and path not in seen
        if method == "GET":
            seen.add(path)
        return fault if first else ""

    network.fault = once
    ours.fetch(3)
    assert network.faults and same(work, made, 3)
    shutil.rmtree(work / "checkpoints" / "3")
    network.calm()
    name = next(name for name in verify.good(made / "checkpoints", 3)["files"] if "/d/" in name)
    (work / "other").write_bytes(bytes((made / "checkpoints" / "3" / name).stat().st_size))
    storage.put(work / "other", f"{bucket}/a/3/{name}")
    with pytest.raises(UserError, match=r"differs from good\.json, in 3 attempts"):
        ours.fetch(3)
    assert not (work / "checkpoints" / "3").exists()


@pytest.mark.slow
def test_a_store_that_is_down_holds_up_nothing(network, bucket, work, capsys):
    down = threading.Event()
    down.set()
    network.fault = lambda number, method, path: "busy" if down.is_set() else ""
    with contextlib.closing(CheckpointManager(work / "checkpoints", keep=9, mirror=f"{bucket}/a")) as checkpoints:
        assert checkpoints.newest() == 3
        checkpoints.save(4, state_of(4), {"step": 4})
        checkpoints.wait()  # tried in vain
        assert "mirror_gave_up" in kinds(work) and "the run continues" in capsys.readouterr().err
        down.clear()
        checkpoints.save(5, state_of(5), {"step": 5})
        checkpoints.wait()
    assert Mirror(work / "checkpoints", f"{bucket}/a").steps() == [5]


@pytest.mark.slow
def test_nothing_here_and_a_store_that_is_down_is_no_new_beginning(network, bucket, work):
    Mirror(work / "checkpoints", f"{bucket}/a").send(3)
    shutil.rmtree(work / "checkpoints")
    network.fault = lambda number, method, path: "busy"
    with pytest.raises(UserError, match="check that the store is up"):
        CheckpointManager(work / "checkpoints", mirror=f"{bucket}/a").newest()
    assert not storage.is_url(str(work))


@pytest.mark.slow
def test_a_store_that_is_down_is_not_fatal_while_an_older_one_is_good(network, bucket, work, capsys):
    Mirror(work / "checkpoints", f"{bucket}/a").send(3)
    next((work / "checkpoints" / "3").rglob("d/*")).write_bytes(b"nonsense")
    network.fault = lambda number, method, path: "busy"
    restored(work, f"{bucket}/a", 2)
    assert "checkpoint 3 cannot be fetched" in capsys.readouterr().err


def test_of_copies_the_newest_that_is_right_is_taken(work, place, tmp_path, capsys):
    ours = Mirror(work / "checkpoints", place)
    ours.send(2), ours.send(3)
    name = next(name for name in ours.good(3)["files"] if "/d/" in name)
    (tmp_path / "other").write_bytes(b"nonsense")
    storage.put(tmp_path / "other", f"{ours.place}/3/{name}")
    shutil.rmtree(work)
    restored(work, place, 2)
    assert "the copy of checkpoint 3 is damaged" in capsys.readouterr().err


def test_what_the_run_went_back_from_does_not_come_back(work, place):
    Mirror(work / "checkpoints", place).send(3)
    with contextlib.closing(CheckpointManager(work / "checkpoints", mirror=place)) as checkpoints:
        checkpoints.discard(above=2)
    shutil.move(work / "checkpoints" / "2", work / "2"), shutil.rmtree(work / "checkpoints" / "1")
    with contextlib.closing(CheckpointManager(work / "checkpoints", mirror=place)) as checkpoints:
        assert checkpoints.newest() is None
    shutil.move(work / "2", work / "checkpoints" / "2")
    ours = Mirror(work / "checkpoints", place)
    ours.send(2)
    assert storage.names(ours.place) == ["2", "owner.json"]  # and takes up no room


@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_whatever_lies_in_place_of_the_owner_is_one_line(tmp_path, make):
    ours = Mirror(tmp_path / "run" / "checkpoints", str(tmp_path / "copies"))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    make(tmp_path / "run" / "checkpoints" / "mirror-owner.json")
    with pytest.raises(UserError, match=r"checkpoint\.mirror: .*mirror-owner.json cannot be read .*; move it away"):
        in_time(ours.fetch)


@pytest.mark.parametrize("make", [*ODD, *WRONG], ids=lambda make: make.__name__)
def test_a_copy_whose_mark_is_something_else_is_no_copy(tmp_path, make):
    (tmp_path / "copies" / "3").mkdir(parents=True)
    make(tmp_path / "copies" / "3" / "good.json")
    ours = Mirror(tmp_path / "run" / "checkpoints", str(tmp_path / "copies"))
    assert in_time(ours.steps) == [] and in_time(ours.fetch) is None


def test_a_protocol_that_needs_more_than_a_url_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"ftp://host/x.*: ftp:// cannot be used .*; use s3:// or gs://"):
        Mirror(tmp_path / "checkpoints", "ftp://host/x").fetch()
