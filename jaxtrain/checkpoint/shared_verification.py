"""Verify a checkpoint in all processes together: each reads its share (`verify.py`)."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import verify
from jaxtrain.checkpoint.orbax.orbax_logging import innermost
from jaxtrain.distributed.coordination import exchange, together
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import reason


class Checks:
    """Verification of the checkpoints in one directory; every process makes all calls."""

    def __init__(self, directory: Path, hashes: bool):
        """Without `hashes`, the files of a good checkpoint are compared by size only."""
        self._directory, self._hashes = directory, hashes
        self.stopping = False  # set to leave unfinished verification to the next start

    def of(self, step: int, name: str) -> list[str]:
        """Return what is wrong with a checkpoint, reading it back if it is not verified yet; call on the main thread.
        """
        def kind(_):
            try:
                verify.read_mark(self._directory, step)
            except FileNotFoundError:
                return "unverified"
            except (OSError, ValueError) as error:
                return f"{verify.MARK} {reason(error)}"
            return "good"

        found, folder = exchange(None, kind), self._directory / str(step)
        if found not in ("good", "unverified"):
            return [found]
        try:
            if found == "unverified":
                return self.read_back(step, name, must_tell=False)
            listed = self._listed(folder, name, also=[verify.MARK])
        except _Unseen as error:
            raise UserError("--workdir", f"{error}", "mount it where all processes see the same files") from None
        except (OSError, ValueError) as error:  # raised in all processes; older checkpoints may be readable
            return [f"it cannot be read back ({error})"]
        try:
            mine = verify.compare_files(folder, verify.read_mark(self._directory, step), *listed, share=_share(),
                                        hashes=self._hashes)
        except (OSError, ValueError) as error:
            mine = [f"{verify.MARK} {reason(error)}"]
        return exchange(mine, lambda theirs: sorted({problem for problems in theirs for problem in problems}))

    def read_back(self, step: int, name: str, must_tell: bool = True) -> list[str]:
        """Read back a committed checkpoint, each process its share; return what is wrong, or mark it good.

        Callable on any thread; `name` must not have been used before. Raises OSError if verification could not be
        completed or, with `must_tell`, if the mark could not be written.
        """
        folder = self._directory / str(step)
        mine: dict[str, Any] = {}
        files, wrong = self._listed(folder, name)
        try:
            i, n = _share()
            words, problems = {}, wrong
            if not wrong:
                words, problems = verify.read_back(folder, step, (i, n), lambda: not self.stopping)
            hashed = {} if problems else {file: verify.hash_file(folder / file) for file in files[i::n]}
            mine = {"files": hashed, "words": words, "problems": problems}
        except Exception as error:
            mine = {"unfinished": innermost(error)}

        def decide(shares):
            for share in shares:
                if "unfinished" in share:
                    raise OSError(share["unfinished"])
            problems = sorted({problem for share in shares for problem in share["problems"]})
            if problems:
                return problems
            files = {name: found for share in shares for name, found in share["files"].items()}
            saved = verify.saved_fingerprint(folder)
            problems = [f"{name} is not visible to all" for name in verify.list_files(folder)[0] if name not in files]
            problems += verify.compare_words(saved, [share["words"] for share in shares])
            if not problems:
                record = {"files": dict(sorted(files.items())), "fingerprint": saved, "meta": verify.saved_meta(folder)}
                with contextlib.nullcontext() if must_tell else contextlib.suppress(OSError):  # the disk may be full
                    verify.write_mark(self._directory, step, record)
            return problems

        return together(f"{name}/read", mine, decide)

    def _listed(self, folder: Path, name: str, also: Sequence[str] = ()) -> tuple[list[str], list[str]]:
        """Return the files as process 0 lists them, once all processes see them (network file systems may lag)."""
        first = jax.process_index() == 0
        files, wrong = together(f"{name}/listed", verify.list_files(folder) if first else None, lambda all: all[0])
        unseen = together(f"{name}/seen", None if first else verify.unseen(folder, [*files, *also]), lambda all: [
            (process, file) for process, file in enumerate(all) if file][:1])
        if unseen:
            raise _Unseen(f"process {unseen[0][0]} does not see {folder / unseen[0][1]}, and process 0 does")
        return files, wrong


class _Unseen(OSError):
    """Raised when processes do not see the same files."""


def _share() -> verify.Share:
    return jax.process_index(), jax.process_count()
