"""Odd things in the folder where islands meet: none stops a coordinator or an island for ever."""

import hashlib
import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from jaxtrain.diloco import folder_meeting
from jaxtrain.diloco.coordinator import Policy
from jaxtrain.diloco.folder_meeting import Bridge, FolderMeeting
from jaxtrain.diloco.meeting import Offer
from jaxtrain.diloco.outer_log import OuterLog
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import Refused
from tests import fuzzing
from tests.odd_files import device, fifo, folder, sparse, unix_socket

HASH = "ab" * 32
NAMES = {
    "offers": ["1-0.json", ".nfs0000000000012345", "7-3.json", "x.json", "1-0.json.partial", "-1-0.json",
               "9" * 30 + "-0.json"],
    "contents": [f"{HASH}-1-0", ".nfs1", "x"], "refused": [f"{HASH}-1-0", "x"],
    "entries": ["000000000001.json", ".nfs2", "x", "9.json", "999999999999.json"],
    "snapshots": [f"000000000001-{HASH}", ".nfs3", "1", f"999999999999-{HASH}", "x-y"],
    "alive": ["1", "coordinator", ".nfs4", "x", "9" * 40]}


def offered(content: bytes) -> tuple[Offer, bytes]:
    return Offer(0, 0, 0, 1.0, hashlib.sha256(content).hexdigest()), content


def text(rng: random.Random, path: Path) -> None:
    forged = asdict(Offer(1, 0, 0, 1.0, HASH)) | {rng.choice(["island", "base", "weight", "sha256"]): rng.choice(
        [-1, 2**70, "x", None, [], 1e999, float("nan")])}
    path.write_text(rng.choice(["", "null", "[" * 99_999, "\0" * 99, json.dumps(forged), json.dumps([forged]),
                                "9" * 70_000]))


def litter(rng: random.Random, place: Path) -> None:
    """Put something odd where a file of islands is, or might be."""
    kind = rng.choice(list(NAMES))
    path = place / kind / rng.choice(NAMES[kind])
    if rng.random() < 0.1:
        path = place / rng.choice(["log", ".nfs5", "x"])
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() or path.is_symlink() or path.name == "log":
        return
    make = rng.choice([fifo, device, folder, sparse, unix_socket, text, lambda path: path.symlink_to("nowhere")])
    try:
        make(rng, path) if make is text else make(path)
    except OSError:  # the path of a socket is too long
        fifo(path)


def case(rng: random.Random, folder: Path) -> str:
    """One island meets a coordinator among odd things."""
    folder_meeting.PAUSE = 0.0, 0.0
    place, log = folder / "m", OuterLog(folder / "log", Policy(islands=1, lease=1e9))
    for _ in range(rng.randint(1, 6)):
        litter(rng, place)
    bridge, far = Bridge(log, str(place), 2**20), FolderMeeting(str(place), 0, sign=1e9, patience=0.0)
    try:
        far.offer(*offered(b"content"))
        for _ in range(2):
            bridge.look()
        entries = [entry.number for entry in far.entries(0, 0)]
        assert [far.content(one.sha256) for entry in far.entries(0, 0) for one in entry.contributions] in (
            [b"content"], []), "another content"
        far.snapshot()
    except (UserError, OSError, ValueError, LookupError) as error:  # which both say, and try again
        assert len(f"{error}") < 1000
        return "told"
    finally:
        far.close()
        log.close()
    return "met" if entries else "waits"


def test_odd_things_where_islands_meet(tmp_path):
    outcomes = fuzzing.run(case, range(60), tmp_path)
    assert outcomes["met"] > 10


@pytest.mark.parametrize("make", [fifo, device, folder, sparse, unix_socket], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["offers/7-3.json", f"contents/{HASH}-1-0", "alive/1"])
def test_an_odd_thing_keeps_nobody_from_meeting(tmp_path, monkeypatch, make, name):
    monkeypatch.setattr(folder_meeting, "PAUSE", (0.0, 0.0))
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    place = Path("m")
    (place / name).parent.mkdir(parents=True)
    make(place / name)
    log = OuterLog(Path("log"), Policy(islands=1, lease=1e9))
    bridge, far = Bridge(log, str(place)), FolderMeeting(str(place), 0, sign=1e9, patience=5)
    far.offer(*offered(b"content"))
    bridge.look()
    assert far.entries(0, 0)[0].contributions and far.content(offered(b"content")[0].sha256) == b"content"
    with pytest.raises((Refused, OSError)):
        bridge._store.read(name, 2**20)
    log.close()


@pytest.mark.parametrize("url", [False, True])
def test_names_that_islands_do_not_give_are_passed_over(tmp_path, url):
    for kind, names in NAMES.items():
        for name in names:
            (tmp_path / kind).mkdir(exist_ok=True)
            (tmp_path / kind / name).write_text("x")
    store = folder_meeting._Store(f"file://{tmp_path}" if url else str(tmp_path))
    assert {kind: store.names(kind) for kind in NAMES} == {
        "offers": ["1-0.json", "7-3.json"], "contents": [f"{HASH}-1-0"], "refused": [f"{HASH}-1-0"],
        "entries": ["000000000001.json", "999999999999.json"],
        "snapshots": [f"000000000001-{HASH}", f"999999999999-{HASH}"], "alive": ["1", "coordinator"]}
    with pytest.raises(Refused, match="Larger than 0 bytes"):
        store.read(f"contents/{HASH}-1-0", 0)


def test_a_content_is_not_much_larger_than_ones_own(tmp_path):
    far = FolderMeeting(str(tmp_path), 0, sign=1e9, patience=0.0)
    far.offer(*offered(b"content"))
    (tmp_path / f"contents/{HASH}-1-0").write_bytes(bytes(2**20 + 29))
    far._names[HASH] = f"{HASH}-1-0"
    with pytest.raises(OSError, match="Larger than 1,048,604 bytes"):
        far.content(HASH)
    far.close()


if __name__ == "__main__":
    fuzzing.main(case)
