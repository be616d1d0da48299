"""Islands that meet in a folder or in object storage, where no port of the coordinator can be reached.

    offers/ISLAND-BASE.json           until the coordinator has taken or refused it
    refused/SHA256-ISLAND-BASE        why it refused that offer, until it is made again
    contents/SHA256-ISLAND-BASE       the content of that offer
    entries/NUMBER.json               the log, as the coordinator decided it
    snapshots/POSITION-SHA256
    log                               the name of the log that is here
    alive/ISLAND                      changes as long as the island lives
    alive/coordinator                 changes as long as a coordinator looks into this place

Islands write offers and snapshots, the coordinator writes entries, nobody changes what is there. A file counts only
when it is whole: what names a content is written after it, and hashes are checked where something is read.
"""

import contextlib
import errno
import hashlib
import json
import math
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from jaxtrain import storage
from jaxtrain.diloco.log_records import as_json, entry_of, offer_of
from jaxtrain.diloco.meeting import Entry, Offer, Trimmed, Unanswered
from jaxtrain.diloco.outer_log import OuterLog
from jaxtrain.errors import UserError, say
from jaxtrain.files import atomic_files, bounded_files

PAUSE = 0.05, 2.0  # seconds between two looks at what is not there yet: the first, growing, and the longest
SIGN_S = 20.0  # between two signs of life
QUIET = 3  # signs of life of an island without one of a coordinator after which it says so, again and again
SERVED, LOG = "alive/coordinator", "log"
LARGEST = 2**36  # bytes of a content or snapshot
SLACK = 4, 2**20  # contents of others are at most this many times as large as one's own, and so many bytes more
_SMALL = 2**16  # bytes of what is neither a content nor an entry
_OFFER = r"[0-9]{1,16}-[0-9]{1,16}"
_NAMES = {"offers": rf"{_OFFER}\.json", "refused": rf"[0-9a-f]{{64}}-{_OFFER}", "contents": rf"[0-9a-f]{{64}}-{_OFFER}",
          "entries": r"[0-9]{12}\.json", "snapshots": r"[0-9]{12}-[0-9a-f]{64}", "alive": r"[0-9]{1,16}|coordinator"}
T = TypeVar("T")


class FolderMeeting:
    """The log as it stands in a folder or store, for one island."""

    def __init__(self, place: str, island: int, islands: int = 1, *, patience: float = 3600.0, sign: float = SIGN_S,
                 unserved: Callable[[], str] | None = None):
        """Take a path or URL, and how many islands meet there.

        Args:
            place: a folder, or a URL of object storage.
            island: the number of this island.
            islands: how many meet there.
            patience: seconds without an answer of the store after which a call raises an OSError.
            sign: seconds between two signs of life.
            unserved: where the store is somewhere to fall back to only: what to say while no coordinator serves it. The
                caller says then, too, that the store is out of reach.
        """
        self._store, self._island, self._patience = _Store(place), island, patience
        self._unserved, self._is_spare = unserved or self._waits, unserved is not None
        self._names: dict[str, str] = {}  # of contents, by hash: those of the entries that were read
        self._closed = threading.Event()
        self._own = 0  # bytes of the largest content that was offered
        self._offered = ""  # the name of the newest offer's content
        self.log = ""  # the name of the log here; "": not known yet
        self._served: bytes | None = None  # the coordinator's newest sign of life
        self._quiet = 0  # looks since it changed, or since the first one without any
        self._fix = f"jaxtrain diloco serve --workdir=DIR --store={place} --islands={islands}"
        self._is_lost = False  # whether it was said that a sign of life could not be given
        if self._is_spare:
            storage.refuse_unusable(place)  # an island can begin without it
        else:
            self._store.names("entries")  # what cannot work at all is said at once
        threading.Thread(target=self._live, args=(sign,), name="islands", daemon=True).start()

    def close(self) -> None:
        """Give no more signs of life."""
        self._closed.set()

    def offer(self, offer: Offer, content: bytes) -> None:
        """Offer progress, as `Meeting` says."""
        name = f"{offer.island}-{offer.base}"
        self._own = max(self._own, len(content))
        self._tried(lambda: self._store.remove(f"refused/{_content(offer)}"))
        self._tried(lambda: self._store.write(f"contents/{offer.sha256}-{name}", content))
        self._tried(lambda: self._store.write(f"offers/{name}.json", json.dumps(asdict(offer)).encode()))
        self._offered = _content(offer)

    def has_taken(self, offer: Offer) -> bool:
        """Return whether the coordinator has taken an offer that was made here; raises a UserError if it refused it."""
        is_gone = self._tried(lambda: not self._store.exists(f"offers/{offer.island}-{offer.base}.json"))
        if is_gone:
            self._check_refused()
        return is_gone

    def find_log(self) -> None:
        """Look for the name of the log, until it is there."""
        self.log = self.log or self._tried(lambda: self._store.read(LOG) or b"").decode(errors="replace")

    @property
    def is_unserved(self) -> bool:
        """Whether a coordinator was looked for, and none has given a sign of life of late."""
        return self._quiet > QUIET or (self._quiet > 0 and self._served is None)

    def entries(self, after: int, wait: float) -> Sequence[Entry]:
        """Return the entries after this one, as `Meeting` says."""
        end, pause = time.monotonic() + wait, PAUSE[0]
        while not (found := self._tried(lambda: self._read_entries(after))):
            self._check_refused()
            if time.monotonic() >= end:
                break
            self._closed.wait(min(pause, end - time.monotonic()))
            pause = min(1.5 * pause, PAUSE[1])
        if wait and not found and self._quiet > QUIET:
            raise Unanswered("entries")  # nobody serves this place
        return found

    def _check_refused(self) -> None:
        name = f"refused/{self._offered}"
        if self._offered and (text := self._tried(lambda: self._store.read(name))) is not None:
            raise UserError(*bounded_files.parsed(text, (str, str, str)))

    def _read_entries(self, after: int) -> list[Entry]:
        found: list[Entry] = []
        while (entry := self._entry(after + 1 + len(found))) is not None:
            found.append(entry)
            self._names |= {one.sha256: _content(one) for one in entry.contributions}
        newest = max([0, *(position for position, _ in self._store.snapshots())])
        if not found and newest > after and self._entry(after + 1) is None:  # a second look: it may have come just now
            raise Trimmed(f"entry {after + 1} is no longer in the log")
        return found

    def _entry(self, number: int) -> Entry | None:
        content = self._store.read(f"entries/{number:012d}.json")
        return None if content is None else entry_of(bounded_files.parsed(content))

    def content(self, sha256: str) -> bytes:
        """Return the content of an offer in the log, as `Meeting` says."""
        times, more = SLACK
        largest = times * self._own + more if self._own else LARGEST  # all islands have one config
        return self._tried(lambda: self._store.read_checked(f"contents/{self._names[sha256]}", sha256, largest))

    def put_snapshot(self, position: int, content: bytes) -> None:
        """Keep the outer state after an entry, as `Meeting` says."""
        sha256 = hashlib.sha256(content).hexdigest()
        if all(there < position for there, _ in self._tried(self._store.snapshots)):
            self._tried(lambda: self._store.write(f"snapshots/{position:012d}-{sha256}", content))

    def snapshot(self) -> tuple[int, bytes] | None:
        """Return the newest snapshot, as `Meeting` says."""
        before = ()
        while there := self._tried(self._store.snapshots):
            position, sha256 = there[-1]
            if before == (before := there[-1]):  # such as a link to nowhere
                raise OSError(f"snapshot {position} in {self._store.place} is listed but cannot be read")
            name = f"snapshots/{position:012d}-{sha256}"
            with contextlib.suppress(Trimmed):  # a newer one came
                return position, self._tried(lambda: self._store.read_checked(name, sha256))  # noqa: B023
        return None

    def _live(self, sign: float) -> None:
        while True:
            try:
                self._store.write(f"alive/{self._island}", uuid.uuid4().hex.encode())
                self._look_for_coordinator()
                self._is_lost = False
            except (UserError, OSError) as error:
                if self._is_spare and not self._is_lost and not self._closed.is_set():
                    self._is_lost = True
                    say(f"{error}; trying again")
            if self._closed.wait(sign):
                return

    def _look_for_coordinator(self) -> None:
        """Say so at once if none was ever here, and every minute while none is."""
        sign = self._store.read(SERVED)
        self.log = self.log or (self._store.read(LOG) or b"").decode(errors="replace")
        if sign != self._served:
            if self.is_unserved:
                say(f"{self._store.place}: a coordinator serves it now")
            self._served, self._quiet = sign, 1
            return
        self._quiet += 1
        if self._quiet % QUIET == 1 and (text := self._unserved()):
            say(text)

    def _waits(self) -> str:
        return (f"{self._store.place}: no coordinator serves it, so island {self._island} waits for the others at its "
                f"next exchange; start one with {self._fix}")

    def _tried(self, do: Callable[[], T]) -> T:
        end, said = time.monotonic() + self._patience, ""
        while True:
            try:
                return do()
            except (UserError, OSError, ValueError) as error:
                if time.monotonic() > end or self._closed.is_set():
                    raise OSError(str(error)) from error
                if said != (said := f"{error}") and not self._is_spare:
                    say(f"{said}; trying again")
            self._closed.wait(PAUSE[1])


class Bridge:
    """Carries offers from a folder or store into the log, and entries from the log to there."""

    def __init__(self, log: OuterLog, place: str, largest: int = LARGEST):
        self._log, self._store, self._alive, self._largest = log, _Store(place), {}, largest
        self._published: int | None = None  # not known until the store was read
        self._signed = -math.inf  # when it gave its last sign of life
        self._is_own = False  # whether the store is known to have this log, or none
        self._left: dict[str, str] = {}  # why offers cannot be taken for now, by name

    def look(self) -> None:
        """Take what came and publish what was decided; the store may be in any state that a kill left."""
        if not self._is_own:
            self._claim()
        if time.monotonic() - self._signed >= SIGN_S:
            self._store.write(SERVED, uuid.uuid4().hex.encode())
            self._signed = time.monotonic()
        for name in filter(str.isdecimal, self._store.names("alive")):
            with contextlib.suppress(bounded_files.Refused):  # something else lies there
                if self._alive.get(name) != (sign := self._store.read(f"alive/{name}")):
                    self._alive[name] = sign
                    self._log.alive(int(name))
        for name in self._store.names("offers"):
            self._take(name)
        self._publish()
        self._snapshots()
        self._trim()

    def _claim(self) -> None:
        """Refuse a store that has another log: islands would take its entries for those of this one."""
        there, name = self._store.read(LOG), self._log.name.encode()
        newest = max([0, *(int(entry[:12]) for entry in self._store.names("entries"))])
        if there not in (None, name) or (there is None and newest > self._log.position):
            raise UserError("--store", f"{self._store.place} has another log than {self._log.folder}",
                            "give a place of its own to each log")
        if there is None:
            self._store.write(LOG, name)
        self._is_own = True

    def _take(self, name: str) -> None:
        try:
            offer = offer_of(bounded_files.parsed(self._store.read(f"offers/{name}") or b""))
            if name != f"{offer.island}-{offer.base}.json":
                raise ValueError(f"its name does not match its content: {offer.island}-{offer.base}")
        except ValueError as error:
            return self._leave(name, error)
        try:
            is_wanted = self._log.wants(offer)
        except UserError as error:
            return self._refuse(name, offer, error)
        if is_wanted:
            try:
                content = self._store.read_checked(f"contents/{_content(offer)}", offer.sha256, self._largest)
            except (ValueError, Trimmed) as error:
                return self._leave(name, error)
            self._log.offer(offer, content)
        taken = self._log.taken(offer)
        if taken is None or taken.sha256 != offer.sha256:  # it came late, or was offered again with another content
            self._store.remove(f"contents/{_content(offer)}")
        self._store.remove(f"offers/{name}")

    def _leave(self, name: str, error: Exception) -> None:
        """Say, once, why an offer cannot be taken for now."""
        if self._left.get(name) != (why := f"{error}"):
            self._left[name] = why
            say(f"offers/{name} in the store of the islands is not taken: {why}")

    def _refuse(self, name: str, offer: Offer, error: UserError) -> None:
        """Tell the island of an offer why it is refused for good."""
        say(f"{error}")
        self._store.write(f"refused/{_content(offer)}", json.dumps([error.key, error.reason, error.fix]).encode())
        self._store.remove(f"contents/{_content(offer)}")
        self._store.remove(f"offers/{name}")

    def _publish(self) -> None:
        if self._published is None:
            self._published = max([0, *(int(name[:12]) for name in self._store.names("entries"))])
        self._published = max(self._published, self._log.trimmed)
        with contextlib.suppress(Trimmed):
            for entry in self._log.entries(min(self._published, self._log.position), 0):
                for offer in entry.contributions:
                    if not self._store.exists(name := f"contents/{_content(offer)}"):
                        self._store.write(name, self._log.content(offer.sha256))
                self._store.write(f"entries/{entry.number:012d}.json", json.dumps(as_json(entry)).encode())
                self._published = entry.number

    def _snapshots(self) -> None:
        there = self._store.snapshots()
        for position, sha256 in there[-1:]:
            if self._log.wants_snapshot(position):
                with contextlib.suppress(Trimmed, ValueError):
                    name = f"snapshots/{position:012d}-{sha256}"
                    self._log.put_snapshot(position, self._store.read_checked(name, sha256, self._largest))
        kept = self._log.snapshots()
        for position, sha256 in kept:
            if (position, sha256) not in there and position <= (self._published or 0):  # its entry is there before it
                self._store.write(f"snapshots/{position:012d}-{sha256}", self._log.content(sha256))
        for position, sha256 in there:
            if len(kept) > 1 and position < kept[0][0]:
                self._store.remove(f"snapshots/{position:012d}-{sha256}")

    def _trim(self) -> None:
        for name in self._store.names("entries"):
            if int(name[:12]) <= self._log.trimmed:
                with contextlib.suppress(ValueError):  # the log itself may have forgotten what was in it
                    entry = entry_of(bounded_files.parsed(self._store.read(f"entries/{name}") or b""))
                    for offer in entry.contributions:
                        self._store.remove(f"contents/{_content(offer)}")
                self._store.remove(f"entries/{name}")


class _Store:
    """Files by name in a folder or below a URL. Whatever else lies there is not touched, and nothing waits for it."""

    def __init__(self, place: str):
        self.place = place

    def names(self, folder: str) -> list[str]:
        """Return the names of a folder that are such as islands give: not `.nfs...`, a file that is still open."""
        where = storage.join(self.place, folder)
        found = storage.names(where) if storage.is_url(where) else (
            sorted(path.name for path in Path(where).glob("*")))
        return [name for name in found if re.fullmatch(_NAMES[folder], name)]

    def snapshots(self) -> list[tuple[int, str]]:
        """Return position and hash of each, the oldest first."""
        parts = [name.partition("-") for name in self.names("snapshots")]
        return [(int(number), sha256) for number, _, sha256 in parts]

    def exists(self, name: str) -> bool:
        return storage.exists(storage.join(self.place, name))

    def read(self, name: str, largest: int = LARGEST) -> bytes | None:
        """Return the content of a regular file; raises `Refused` for anything else, and for one that is too large."""
        kind = name.partition("/")[0]
        limit = largest if kind in ("contents", "snapshots") else bounded_files.SMALL if kind == "entries" else _SMALL
        try:
            return storage.read_small(storage.join(self.place, name), limit)
        except (FileNotFoundError, storage.Gone):
            return None
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.ENXIO):  # a folder, or a socket
                raise
            raise bounded_files.Refused(error.errno, error.strerror, error.filename) from None

    def read_checked(self, name: str, sha256: str, largest: int = LARGEST) -> bytes:
        if (content := self.read(name, largest)) is None:
            raise Trimmed(f"{name} is not there")
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError(f"{name} does not match the hash in its name")
        return content

    def write(self, name: str, content: bytes) -> None:
        path = storage.join(self.place, name)
        if storage.is_url(path):
            with tempfile.NamedTemporaryFile() as file:
                file.write(content)
                file.flush()
                return storage.put(Path(file.name), path)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with atomic_files.written(Path(path)) as file:
            file.write(content)

    def remove(self, name: str) -> None:
        path = storage.join(self.place, name)
        if storage.is_url(path):
            return storage.remove(path)
        if Path(path).is_symlink() or not Path(path).is_dir():  # a folder there is nobody's of an island
            Path(path).unlink(missing_ok=True)


def _content(offer: Offer) -> str:
    return f"{offer.sha256}-{offer.island}-{offer.base}"
