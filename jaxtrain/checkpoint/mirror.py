"""A mirror: a second copy of each good checkpoint, in object storage or under another path.

Process 0, which sees all files, copies in the background. Every object is read back and compared, and `good.json` is
written last, so that a copy is either complete or not there. An unavailable store blocks nothing: the copy is retried
until the next checkpoint replaces it. A partial copy is resumed.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxtrain import storage
from jaxtrain.checkpoint import verify
from jaxtrain.checkpoint.step_folders import FETCHING
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files, bounded_files
from jaxtrain.files.safe_names import inside
from jaxtrain.observe import events

THREADS = 8  # files transferred at a time
AGAIN = 3  # attempts to send or fetch a file that arrives changed
PAUSE = 15.0, 600.0  # seconds before a failed copy is retried: at first (doubled each time), and at most
OWNER = "owner.json"  # identifies the run whose copies these are
Kept = Callable[[list[int]], Iterable[int]]  # the good steps present, in order -> those to keep


class Different(UserError):
    """Raised when received content differs from what was sent."""


class Mirror:
    """The mirror of one run's checkpoints.

    Args:
        directory: the run's checkpoints, in its workdir.
        place: a URL that fsspec supports, or a path.
        kept: which copies stay, applied whenever one is complete; by default all.
    """

    def __init__(self, directory: str | Path, place: str, kept: Kept = lambda good: good):
        self._directory = Path(directory).absolute()
        storage.refuse_hidden(place)
        self.place = place if storage.is_url(place) else f"file://{Path(place).expanduser().absolute()}"
        self._kept = kept
        self.pinned: set[int] = set()  # the step being copied, which must not be deleted meanwhile
        self._wanted: int | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._waiting = 0
        self._thread: threading.Thread | None = None

    # ----------------------------------------------------------------------------------------------- in the background
    def copy(self, step: int, path: Path | None = None) -> None:
        """Schedule a good checkpoint for copying and return at once; it replaces one still waiting for its turn."""
        with self._changed:
            self._wanted = step
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait until all is copied, or one more attempt at what is left has failed."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._wanted is None and not self.pinned)
            self._waiting -= 1

    def close(self) -> None:
        """Start nothing more; an unfinished copy is abandoned, and the next start resumes it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _work(self) -> None:
        failures = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._wanted is not None)
                if self._closing or self._wanted is None:
                    return
                step, self._wanted = self._wanted, None
                self.pinned = {step}
            problem = self._copied(step)
            failures = failures + 1 if problem else 0
            if problem:
                self._pause(step, problem, failures)
            with self._changed:
                self.pinned = set()
                self._changed.notify_all()

    def _copied(self, step: int) -> str:
        """Copy a step; return what went wrong, or ""."""
        try:
            if self.send(step):
                self._tell("mirror_copied", "", step=step, place=self.place)
            return ""
        except UserError as error:
            return f"{error.key}: {error.reason}"
        except Exception as error:  # training goes on in any case
            return f"{type(error).__name__}: {error}"

    def _pause(self, step: int, problem: str, failures: int) -> None:
        """After a failure, schedule a retry, unless a newer checkpoint is waiting by then."""
        if failures == 1:
            self._tell("mirror_failed", f"checkpoint {step} is not copied to {self.place} yet ({problem}); the copy is "
                       "retried while the run continues", step=step, place=self.place, reason=problem)
        first, longest = PAUSE
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting or self._wanted is not None,
                                   timeout=min(longest, first * 2 ** (failures - 1)))
            given_up = self._closing or (self._waiting and failures > 1) or self._wanted is not None
            if not given_up:
                self._wanted = step
        if given_up:
            self._tell("mirror_gave_up", f"checkpoint {step} was not copied to {self.place} ({problem})", step=step,
                       place=self.place, reason=problem)

    # ------------------------------------------------------------------------------------------------- there, and back
    def steps(self) -> list[int]:
        """Return the steps of which the mirror holds a complete copy."""
        return sorted(int(name) for name in storage.names(self.place) if name.isdecimal() and self.good(int(name)))

    def good(self, step: int) -> verify.Record | None:
        """Return the content of the copy's `good.json`, or None if it is missing or invalid."""
        with contextlib.suppress(storage.Gone, ValueError):
            return verify.parse_mark(storage.read_small(self._url(step, verify.MARK), bounded_files.LARGE), step)
        return None

    def send(self, step: int) -> int:
        """Copy a checkpoint now, and delete copies that need not stay; return how many files were sent.

        Raises `UserError`.
        """
        self._own()
        record, folder = verify.read_mark(self._directory, step), self._directory / str(step)
        if (there := self.good(step)) == record:
            return 0
        if there:  # from a history that the run rolled back
            storage.remove(self._url(step, verify.MARK))
        there = {found.name: found.size for found in storage.find(self._url(step))}

        def send(name: str) -> int:
            size, sha256 = record["files"][name]
            return self._send(folder / name, self._url(step, name), size, sha256, there.get(name))

        with ThreadPoolExecutor(THREADS) as pool:
            sent = sum(pool.map(send, record["files"]))
        mark = folder / verify.MARK
        sent += self._send(mark, self._url(step, verify.MARK), *verify.hash_file(mark), there.get(verify.MARK))
        good = self.steps()
        # Copies of later steps are from a history that the run rolled back.
        kept = {step, *self._kept([other for other in good if other <= step])}
        for other in map(int, filter(str.isdecimal, storage.names(self.place))):
            if other not in kept:  # includes partial copies that a newer one superseded
                storage.remove(self._url(other, verify.MARK))  # first, so that a partial copy does not look complete
                storage.remove(self._url(other))
        return sent

    def hide(self, above: int) -> list[int]:
        """Invalidate copies of later steps and return these steps; they become valid when the run copies them again."""
        self._own()
        hidden = [step for step in self.steps() if step > above]
        for step in hidden:
            storage.remove(self._url(step, verify.MARK))
        return hidden

    def _send(self, path: Path, url: str, size: int, sha256: str, there: int | None) -> int:
        if there == size and _digest(url) == sha256:
            return 0
        for _ in range(AGAIN):
            if self._closing:
                raise UserError(self.place, "the run ends", "the next start continues")
            storage.put(path, url)
            if storage.size(url) == size and _digest(url) == sha256:
                return 1
        raise UserError(url, f"differs from what was sent in {AGAIN} attempts", "check whether others write there")

    def fetch(self, step: int | None = None) -> int | None:
        """Fetch the copy of this step, or the newest, into the run's directory; return its step, or None.

        Every file is compared with `good.json` before the checkpoint gets its name. If the newest copy fails the
        comparison, this is reported and the one before it is used. Raises `UserError`.
        """
        self._own()
        steps = [found for found in self.steps() if step in (None, found)]
        for found in reversed(steps):
            try:
                return self._bring(found)
            except (Different, storage.Gone) as error:
                if found == steps[0]:
                    raise
                self._tell("mirror_damaged", f"the copy of checkpoint {found} is damaged ({error.key}: {error.reason}) "
                           "and passed over", step=found, place=self.place, reason=error.reason)
        return None

    def _bring(self, step: int) -> int:
        record, folder = self.good(step), self._directory / f"{step}{FETCHING}"
        if record is None:
            raise storage.Gone(self._url(step), "is gone", "check what deletes the copies")
        self._tell("mirror_fetching", f"checkpoint {step} is fetched from {self.place}", step=step, place=self.place)
        names = [*record["files"], verify.MARK]
        for parent in {(folder / name).parent for name in names}:
            parent.mkdir(parents=True, exist_ok=True)
        for name in set(verify.list_files(folder)[0]) - record["files"].keys():  # of an earlier attempt
            (folder / name).unlink()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda name: _fetch(self._url(step, name), inside(folder, name),
                                              *record["files"].get(name, (0, ""))), names))
        problems = verify.compare_files(folder, record, *verify.list_files(folder), hashes=False)
        try:
            same = verify.parse_mark(bounded_files.read(folder / verify.MARK, bounded_files.LARGE), step) == record
        except (OSError, ValueError):
            same = False
        if problems or not same:
            raise Different(self._url(step), (problems or ["its good.json changed while it was fetched"])[0],
                            "use the copy of an older step")
        config = self._directory.parent / "config.json"
        if not config.exists() and (theirs := record.get("meta", {}).get("config")):
            # From it a different run is recognized and refused.
            atomic_files.write(config, json.dumps(theirs, indent=2) + "\n")
        os.replace(folder, self._directory / str(step))
        return step

    def _own(self) -> None:
        """Claim the mirror for this run; raises `UserError` if it holds copies of another run."""
        mine, theirs = self._directory / f"mirror-{OWNER}", storage.join(self.place, OWNER)
        try:
            here = bounded_files.read(mine).decode(errors="replace") if mine.exists() else ""
        except OSError as error:
            raise UserError("checkpoint.mirror", f"{mine} cannot be read ({error.strerror})", "move it away") from error
        if storage.exists(theirs):
            there = storage.read_small(theirs).decode(errors="replace")
            if here != there and (here or verify.steps(self._directory)):  # it did not just lose its directory
                raise UserError("checkpoint.mirror", f"{self.place} holds copies of another run",
                                "give this run its own place")
        else:
            there = here or json.dumps({"run": secrets.token_hex(8)})
        if not here:
            self._directory.mkdir(parents=True, exist_ok=True)
            mine.write_text(there)
        if not storage.exists(theirs):
            storage.put(mine, theirs)

    def _url(self, step: int, name: str = "") -> str:
        folder = storage.join(self.place, str(step))
        return storage.join(folder, name) if name else folder

    def _tell(self, kind: str, sentence: str, **fields: object) -> None:
        events.tell(self._directory.parent, kind, sentence, **fields)


def _fetch(url: str, path: Path, size: int, sha256: str) -> None:
    """Download a file unless an intact one is there; without a sha256 there is nothing to compare.

    A copy of another size than good.json says is not even downloaded: it may be any size.
    """
    if sha256 and path.exists() and verify.hash_file(path) == (size, sha256):
        return
    if sha256 and (there := storage.size(url)) != size:
        raise Different(url, f"has {there:,} bytes, and good.json says {size:,}", "use the copy of an older step")
    for _ in range(AGAIN):
        with storage.open(url) as source, open(path, "wb") as file:
            shutil.copyfileobj(source, file, storage.BLOCK)
            file.flush()
            os.fsync(file.fileno())
        if not sha256 or verify.hash_file(path) == (size, sha256):
            return
    raise Different(url, f"differs from good.json, in {AGAIN} attempts", "use the copy of an older step")


def _digest(url: str) -> str:
    with storage.open(url) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
