"""The log of outer updates on disk, with the contents of its offers and two snapshots: what a coordinator serves.

    journal.jsonl           what was decided, a line each with its hash; synced to disk before anybody is told
    contents/SHA256         contents of offers in the log, or in the open round
    partial/ISLAND-SHA256   what has come of a content so far
    snapshots/POSITION-SHA256
    name                    of the log, by which a store is known to be its own
    lock                    one coordinator at a time

Entries up to the older snapshot are not served: they go, with their contents, and the journal begins with a summary of
them. A coordinator that was killed at any moment goes on from this folder. A last line that was not written whole was
never told, and is cut off. If the folder cannot be written, the coordinator stops: what it cannot keep it must not
decide.
"""

import contextlib
import errno
import hashlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxtrain.base.annotations import JsonObject
from jaxtrain.diloco.coordinator import Coordinator, Policy, compacted
from jaxtrain.diloco.log_records import is_hash
from jaxtrain.diloco.meeting import Entry, Offer, Trimmed
from jaxtrain.distributed.run_lock import locked
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files, bounded_files
from jaxtrain.files.append_log import AppendLog

PARTIAL = 4  # contents of one island that may be under way; the oldest of more are dropped


class OuterLog:
    """The log of a folder: what `Meeting` says, for all islands, from any thread."""

    def __init__(self, folder: str | Path, policy: Policy, clock: Callable[[], float] = time.monotonic):
        """Lock the folder and read the log in it, or begin one."""
        self.folder, self._clock = Path(folder), clock
        self._changed, self._receiving, self._held = threading.Condition(), threading.Lock(), contextlib.ExitStack()
        try:
            for name in ("contents", "partial", "snapshots"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            if other := self._held.enter_context(locked(self.folder, 0)):
                raise UserError("--workdir", f"another coordinator is using {folder} ({other})", "end that one first")
            self.name = _name(self.folder / "name")
            self._journal = _Journal(self.folder / "journal.jsonl")
            self._coordinator, self.failed = Coordinator(policy, self._journal.records), ""  # why it decides no more
            if self.trimmed < self._coordinator.begins:
                raise UserError("--workdir", f"{folder} lacks the snapshot of entry {self._coordinator.begins}",
                                "restore it, or begin another log")
            with self._changed:
                self._compact()  # where a kill came before it
        except OSError as error:
            raise UserError("--workdir", f"{folder} cannot be used ({error.strerror or error})",
                            "give a folder that can be written") from error

    def close(self) -> None:
        """Let another coordinator have the folder."""
        self._held.close()
        self._journal.close()

    @property
    def position(self) -> int:
        """The number of the newest entry."""
        return self._coordinator.position

    @property
    def trimmed(self) -> int:
        """The number of the newest entry whose contents may be gone."""
        snapshots = self.snapshots()
        return snapshots[-2][0] if len(snapshots) > 1 else 0

    def wants(self, offer: Offer) -> bool:
        """Return whether an offer would change anything, so that its content is worth sending."""
        with self._changed:
            return bool(self._decided(lambda now: self._coordinator.offer(offer, now)))

    def offer(self, offer: Offer, content: bytes | None = None) -> bool:
        """Take an offer whose content is given, or has been received before.

        Returns:
            False if its content is missing; everything else is settled.
        """
        if content is not None:
            self.begin(offer.island, offer.sha256, content)
        if self.wants(offer) and not self._is_here(offer):
            return False
        with self._changed:
            records = self._decided(lambda now: self._coordinator.offer(offer, now))
            if records and not self._claim(offer):  # here, since what no offer needs is removed at any other time
                return False
            self._write(records)
            self._write(self._decided(self._coordinator.tick))
        return True

    def alive(self, island: int) -> None:
        """Note a sign of life of an island."""
        with self._changed:
            self._coordinator.alive(island, self._clock())

    def tick(self) -> None:
        """Close the round if it is time; to be called now and then."""
        with self._changed:
            self._write(self._decided(self._coordinator.tick))

    def entries(self, after: int, wait: float) -> Sequence[Entry]:
        """Return the entries after this one, as `Meeting` says."""
        with self._changed:
            if after > self.position:
                raise UserError("the log of islands", f"it has {self.position} entries, and an island had {after}",
                                "let all islands meet at the log that they started with, or start again")
            self._changed.wait_for(lambda: self.position > after or self.failed, wait)
            if after < self.trimmed:  # now: two snapshots may have come meanwhile
                raise Trimmed(f"the log begins after entry {self.trimmed}")
            return self._coordinator.after(after)

    def content(self, sha256: str) -> bytes:
        """Return the content of an offer in the log, as `Meeting` says."""
        return self.part(sha256, 0, None)[1]

    def part(self, sha256: str, start: int, length: int | None) -> tuple[int, bytes]:
        """Return the size of a content or a snapshot, and so many of its bytes from `start` on."""
        for path in (self._content(sha256), *(self._snapshot(*one) for one in self.snapshots() if one[1] == sha256)):
            with contextlib.suppress(FileNotFoundError), bounded_files.opened(path) as file:
                file.seek(start)
                return os.fstat(file.fileno()).st_size, file.read(-1 if length is None else length)
        raise Trimmed(f"the log has no content {sha256}")

    def begin(self, island: int, sha256: str, part: bytes = b"", start: int = 0) -> int:
        """Receive a part of a content; returns how many bytes of it are here, from where the next one should start."""
        if self._content(sha256).exists():
            return self._content(sha256).stat().st_size
        path = self._partial(island, sha256)
        with self._receiving, bounded_files.appended(path) as file:
            here = os.fstat(file.fileno()).st_size
            if start <= here < start + len(part):
                file.write(memoryview(part)[here - start:])
                here = start + len(part)
        mine = sorted(self.folder.glob(f"partial/{island}-*"), key=lambda one: one.stat().st_mtime_ns)
        for old in mine[:-PARTIAL]:
            old.unlink(missing_ok=True)
        return here

    def put_snapshot(self, position: int, content: bytes) -> None:
        """Keep a snapshot, as `Meeting` says."""
        sha256 = hashlib.sha256(content).hexdigest()
        if self.wants_snapshot(position):
            self.begin(0, sha256, content)
            self.claim_snapshot(0, position, sha256)

    def wants_snapshot(self, position: int) -> bool:
        """Return whether a snapshot of this position would be kept."""
        newest = [0, *(number for number, _ in self.snapshots())][-1]
        return newest < position <= self.position

    def claim_snapshot(self, island: int, position: int, sha256: str) -> bool:
        """Keep as a snapshot what has been received before; returns False if it is missing."""
        if not self.wants_snapshot(position):
            return True
        path = self._partial(island, sha256)
        if not _verified(path, sha256):
            return False
        with self._changed:
            os.replace(path, self._snapshot(position, sha256))
            atomic_files.sync(self.folder / "snapshots")
            self._compact()
        return True

    def snapshots(self) -> list[tuple[int, str]]:
        """Return position and hash of the snapshots, the oldest first: two at most."""
        names = sorted(path.name.split("-") for path in (self.folder / "snapshots").glob("*-*"))
        return [(int(number), sha256) for number, sha256 in names]

    def taken(self, offer: Offer) -> Offer | None:
        """Return the offer of this island with this base that is open or in the log, whatever its content."""
        with self._changed:
            return self._coordinator.taken(offer)

    def newest_snapshot(self) -> tuple[int, str] | None:
        """Return position and hash of the newest snapshot."""
        return next(reversed(self.snapshots()), None)

    def snapshot(self) -> tuple[int, bytes] | None:
        """Return the newest snapshot, as `Meeting` says."""
        newest = self.newest_snapshot()
        return newest and (newest[0], self.content(newest[1]))

    def _decided(self, decide: Callable[[float], list[JsonObject]]) -> list[JsonObject]:
        if self.failed:
            raise OSError(self.failed)
        return decide(self._clock())

    def _write(self, records: list[JsonObject]) -> None:
        for record in records:
            with self._or_failed():
                self._journal.append(record)
            self._coordinator.apply(record)
            self._changed.notify_all()

    def _compact(self) -> None:
        """Delete what is not served any more, and put a summary in the place of such entries."""
        for old in self.snapshots()[:-2]:
            self._snapshot(*old).unlink(missing_ok=True)
        kept = self._kept()
        for content in (self.folder / "contents").iterdir():
            if content.name not in kept:
                content.unlink(missing_ok=True)
        if self._coordinator.begins < (trimmed := self.trimmed):
            with self._or_failed():
                self._journal.compact(trimmed)
            self._coordinator.forget(trimmed)

    @contextlib.contextmanager
    def _or_failed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failed = f"{self.folder} cannot be written ({error.strerror or error})"
            self._changed.notify_all()
            raise

    def _is_here(self, offer: Offer) -> bool:
        """Return whether a content was received whole; one that is damaged is deleted."""
        sha256 = offer.sha256
        return self._content(sha256).exists() or _verified(self._partial(offer.island, sha256), sha256)

    def _claim(self, offer: Offer) -> bool:
        """Make a content one of the log's; False if it is no longer here."""
        path = self._content(offer.sha256)
        if not path.exists():
            try:
                os.replace(self._partial(offer.island, offer.sha256), path)
            except FileNotFoundError:
                return False
            atomic_files.sync(path.parent)
        return True

    def _kept(self) -> set[str]:
        later = (offer for entry in self._coordinator.after(self.trimmed) for offer in entry.contributions)
        return {offer.sha256 for offer in (*self._coordinator.open.values(), *later)}

    def _content(self, sha256: str) -> Path:
        return self.folder / "contents" / _hash(sha256)

    def _partial(self, island: int, sha256: str) -> Path:
        return self.folder / "partial" / f"{island}-{_hash(sha256)}"

    def _snapshot(self, position: int, sha256: str) -> Path:
        return self.folder / "snapshots" / f"{position:012d}-{_hash(sha256)}"


def _name(path: Path) -> str:
    if not path.exists():
        atomic_files.write(path, uuid.uuid4().hex, durable=True)
    return bounded_files.read(path).decode(errors="replace").strip()


class _Journal:
    """A file of records, one a line with its hash; a record that `append` returned from survives a power failure."""

    def __init__(self, path: Path):
        self.records, good = read_journal(path) if path.exists() else ([], 0)
        self._path, self._log = path, AppendLog(path)
        os.truncate(path, good)
        os.fsync(self._log.file.fileno())
        atomic_files.sync(path.parent)

    def append(self, record: JsonObject) -> None:
        line = _line({**record, "time": round(time.time(), 3)})  # for people
        if not self._log.is_at_its_path():  # a new file would lack the records before this one
            raise OSError(errno.ESTALE, f"{self._path.name} was deleted or replaced")
        if self._log.file.write(line) != len(line):
            raise OSError("it was written in part")
        os.fsync(self._log.file.fileno())

    def compact(self, number: int) -> None:
        """Replace the records up to entry `number` by their summary; the file is the old or the new one, whole."""
        records, _ = read_journal(self._path)
        with atomic_files.written(self._path, shared=False) as file:
            file.writelines(map(_line, compacted(records, number)))
        atomic_files.sync(self._path.parent)  # before anything is appended: the old file lacks it
        self._log.follow()

    def close(self) -> None:
        self._log.close()


def read_journal(path: Path) -> tuple[list[JsonObject], int]:
    """Return the records of a journal, and after how many bytes they end; the last line may have been cut off."""
    records, good, lines = [], 0, list(bounded_files.lines_with_ends(path))
    for number, (line, end) in enumerate(lines, 1):
        hashed, _, text = line.rstrip(b"\n").partition(b" ")
        if hashed != _line_hash(text):
            if number < len(lines):
                raise UserError(str(path), f"line {number} is damaged", "restore the file, or begin another log")
            break
        records.append(bounded_files.parsed(text))
        good = end
    return records, good


def _line(record: JsonObject) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return _line_hash(text) + b" " + text + b"\n"


def _line_hash(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:16].encode()


def _hash(sha256: str) -> str:
    if not is_hash(sha256):
        raise ValueError("is not a hash")
    return sha256


def _verified(path: Path, sha256: str) -> bool:
    """Return whether a file has this hash, and make it durable; one that has not is deleted, to be sent again."""
    try:
        if atomic_files.file_digest(path) == sha256:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            return True
    except FileNotFoundError:
        return False
    path.unlink(missing_ok=True)
    return False
