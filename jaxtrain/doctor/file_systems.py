"""Check the file system of the workdir: free space, speed for checkpoints, locks, and its clock."""

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from jaxtrain.doctor.child import Budget, Measured, Outcome, say
from jaxtrain.doctor.finding import Finding, fail, note, ok, size, warn

CHECK = "workdir"
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse.glusterfs", "9p",
           "afs", "wekafs", "fuse.sshfs", "fuse.juicefs", "fuse.JuiceFS", "panfs", "orangefs", "virtiofs"}
OBJECTS = {"fuse.gcsfuse", "fuse.s3fs", "fuse.mount-s3", "fuse.goofys", "fuse.rclone"}  # cannot rename
MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
SKEW = 2.0  # seconds
_BYTES, _BLOCK, _MANY = 64 * 2**20, 2**20, 200
_FULL, _TIGHT = 500 * 10**6, 20 * 10**9  # bytes free
_SLOW, _SLOW_SMALL = 50 * 10**6, 20  # bytes a second, files a second


def files(outcome: Outcome, mounts: str, several: bool) -> list[Finding]:
    """Return findings about the file system, from the measurements of a child.

    Args:
        outcome: of this module as a child.
        mounts: the content of /proc/mounts.
        several: whether the run will use several hosts.
    """
    seen = outcome.measured
    where = seen.get("folder", "the workdir")
    if "took longer" in outcome.end and "wrote" not in seen:
        return [fail(CHECK, f"{where} does not answer: it {outcome.end}",
                     "see whether its server is up (mount, df), or give another --workdir")]
    found = kind(where, mounts, several) if "folder" in seen else []
    if seen.get("missing"):
        found.insert(0, note(CHECK, f"{seen['missing']} does not exist, so {where} was checked",
                             "look at its spelling; a run creates it"))
    if "refused" in seen:
        return [*found, fail(CHECK, f"{where} cannot be written ({seen['refused']})", "give another --workdir")]
    found += room(seen)
    if "wrote" in seen:
        found += rates(seen)
    if "skew" in seen:
        found += clock(seen["skew"])
    if seen.get("locks") is False:
        found.append(fail(CHECK, f"{where} has no file locks, and the supervisor needs one",
                          "mount it with locks (Lustre: -o flock), or give another --workdir"))
    if outcome.end:
        said = f" {outcome.stderr.strip()[-200:]}".rstrip()
        found.append(warn(CHECK, f"{where} was not measured to the end: it {outcome.end}{said}",
                          "look whether the disk or its server is overloaded"))
    return found


def kind(where: str, mounts: str, several: bool) -> list[Finding]:
    """Check whether the workdir outlives this machine, and whether all hosts see it."""
    system = filesystem(where, mounts)
    if system in MEMORY:
        return [warn(CHECK, f"{where} is in memory ({system}): lost with this machine, and takes the run's memory",
                     "give a --workdir on a disk")]
    if system in OBJECTS:
        return [warn(CHECK, f"{where} is an object store ({system}): renaming is slow, and appending copies a file",
                     "give a --workdir on a disk, and the store as --config.checkpoint.mirror")]
    if system == "overlay":
        return [note(CHECK, f"{where} is in the container's own layer, and is lost with it", "mount a volume there")]
    if system in NETWORK:
        return [ok(CHECK, f"{where} is on {system}, which other hosts can see")]
    if several and system:
        return [warn(CHECK, f"{where} is on {system}, which other hosts do not see",
                     "give a --workdir that all hosts share, unless this one is shared after all")]
    return [ok(CHECK, f"{where} is on {system or 'a disk'}")]


def filesystem(where: str, mounts: str) -> str:
    """Return the type of a folder's file system: that of the deepest mount, of equal ones the last."""
    best, name = -1, ""
    for line in mounts.splitlines():
        point, system = line.split()[1:3] if len(line.split()) > 2 else ("", "")
        point = point.encode().decode("unicode_escape")  # \040 is a space
        inside = point == "/" or where == point or where.startswith(f"{point}/")
        if point and inside and len(point) >= best:
            best, name = len(point), system
    return name


def room(seen: Measured) -> list[Finding]:
    """Check free space and inodes."""
    found, free = [], seen.get("free")
    if free is not None and free < _FULL:
        found.append(fail(CHECK, f"{size(free)} free", "make room, or give another --workdir"))
    elif free is not None and free < _TIGHT:
        found.append(warn(CHECK, f"{size(free)} free; a checkpoint has 12 bytes per parameter, and three are kept",
                          "make room, or give another --workdir"))
    elif free is not None:
        found.append(ok(CHECK, f"{size(free)} free"))
    if seen.get("names") is not None and 0 <= seen["names"] < 10_000:
        found.append(warn(CHECK, f"only {seen['names']} more files can be made (inodes)",
                          "delete files, or give another --workdir"))
    return found


def rates(seen: Measured) -> list[Finding]:
    """Check the speed of writing, of reading, and of creating small files."""
    wrote, read, small = seen["wrote"], seen.get("read"), seen.get("small")
    said = f"writes {size(wrote)}/s" + (f", reads {size(read)}/s" if read else "") + (
        f", makes {small:.0f} small files per second" if small else "")
    if wrote < _SLOW or (read or wrote) < _SLOW:
        return [warn("disk", f"{said}: saves and restores take long",
                     "give a --workdir on a faster disk, or save less often (raise checkpoint.every)")]
    if small and small < _SLOW_SMALL:
        return [warn("disk", f"{said}: a checkpoint has hundreds of them",
                     "give a --workdir on a local disk, with checkpoint.mirror on this one")]
    return [ok("disk", said)]


def clock(skew: float) -> list[Finding]:
    """Compare the file system's clock with the machine's; hosts compare times through it."""
    if abs(skew) > SKEW:
        side = "ahead of" if skew > 0 else "behind"
        return [warn("clock", f"the file system's is {abs(skew):.1f} s {side} this machine's",
                     "synchronise both with NTP (chronyc tracking shows the state)")]
    return [ok("clock", "the file system's clock agrees with this machine's")]


def cache(folder: str) -> list[Finding]:
    """Check the cache folder of compiled programs and tokenised text."""
    if "://" in folder:
        return []
    there = _existing(Path(folder))
    if not os.access(there, os.W_OK | os.X_OK):
        return [warn("cache", f"{folder} cannot be written: every start compiles and tokenises again",
                     "set JAXTRAIN_CACHE=DIR, a folder that can be written")]
    if (free := shutil.disk_usage(there).free) < _FULL:
        return [warn("cache", f"{folder} has {size(free)} free", "delete old files there, or set JAXTRAIN_CACHE=DIR")]
    return [ok("cache", f"{folder} can be written")]


# ------------------------------------------------------------------------------------------------------------ measuring
def measure(workdir: Path) -> None:
    """Measure a folder's file system and print the results; called in the child, leaves no files."""
    folder = _existing(workdir)
    say(folder=str(folder.resolve()), missing="" if folder == workdir.absolute() else str(workdir))
    if (first := next((path for path in (workdir, *workdir.parents) if path.exists() and not path.is_dir()), None)):
        say(refused=f"{first} is a file")
        return
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".jaxtrain-doctor-", dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        say(refused=error.strerror)
        return
    with scratch as name:
        stat = os.statvfs(name)
        say(free=shutil.disk_usage(name).free, names=stat.f_favail if stat.f_files else -1)
        say(skew=_skew(Path(name)), locks=_locks(Path(name)))
        if shutil.disk_usage(name).free > 2 * _BYTES:
            _rates(Path(name))


def _existing(folder: Path) -> Path:
    """Return the folder itself, or the existing folder in which the run will create it."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _rates(folder: Path) -> None:
    block, path, written, budget = os.urandom(_BLOCK), folder / "large", 0, Budget(8)
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        while written < _BYTES and budget.left():
            written += file.write(block)
        os.fsync(file.fileno())
        say(wrote=written / (time.perf_counter() - start))
        with contextlib.suppress(OSError, AttributeError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # otherwise the page cache would be read
    start, size_read, budget = time.perf_counter(), 0, Budget(8)
    with open(path, "rb", buffering=0) as file:
        while (content := file.read(_BLOCK)) and budget.left():
            size_read += len(content)
    say(read=size_read / (time.perf_counter() - start))
    path.unlink()
    start, made, budget = time.perf_counter(), 0, Budget(4)
    while made < _MANY and budget.left():
        (folder / "small.part").write_bytes(b"x" * 100)
        (folder / "small.part").rename(folder / f"small-{made}")
        made += 1
    say(small=made / (time.perf_counter() - start))


def _skew(folder: Path) -> float:
    """Return how many seconds the file system's clock is ahead."""
    path = folder / "now"
    before = time.time()
    path.write_bytes(b"x")
    after = time.time()
    stamp = path.stat().st_mtime
    return stamp - before if stamp < before - 0.1 else max(stamp - after, 0.0)  # tolerates rounding by the kernel


def _locks(folder: Path) -> bool:
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
