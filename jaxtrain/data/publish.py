"""Copy a corpus to object storage: every object is read back, and the manifest is written last."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from jaxtrain import storage
from jaxtrain.data.corpus.corpus import SPLITS
from jaxtrain.data.corpus.open import read_manifest
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files

THREADS = 8  # concurrent transfers
AGAIN = 3  # attempts to send a file that does not arrive intact


def planned(corpus: str | Path, url: str) -> tuple[Path, dict[str, str], dict[str, int]]:
    """Return the folder of a corpus, the SHA-256 of its files but the manifest, and the sizes of what is at the URL.

    Raises:
        UserError: it is not a corpus, or not one that can be copied there.
    """
    if not storage.is_url(url):
        raise UserError("--output", f"{url!r} is not a URL", "name one as s3://bucket/name")
    folder = Path(corpus).expanduser()
    if (folder / "config.json").is_file() and not (folder / "manifest.json").is_file():
        raise UserError("CORPUS", f"{folder} has a model, and this command copies corpora", "write the model of a run "
                        "as a folder for others: jaxtrain export")
    manifest = read_manifest(folder)
    there = {found.name: found.size for found in storage.find(url)} if storage.exists(url) else {}
    if "manifest.json" in there and read_manifest(url)["sha256"] != manifest["sha256"]:
        raise UserError("--output", f"{url} holds another corpus", "name another place, or delete it")
    wanted = {name: sha256 for split in SPLITS for shard in manifest["splits"][split]["shards"]
              for name, sha256 in shard["sha256"].items()}
    if file := manifest["tokenizer"]["file"]:
        with _readable(folder / file):
            wanted[file] = atomic_files.file_digest(folder / file)
    return folder, wanted, there


def publish(corpus: str | Path, url: str, say=lambda line: None) -> int:
    """Copy a corpus to a URL, and return the number of files sent."""
    folder, wanted, there = planned(corpus, url)
    sent = 0
    with ThreadPoolExecutor(THREADS) as pool:
        under_way = [pool.submit(_put, folder / name, storage.join(url, name), sha256, there.get(name))
                     for name, sha256 in wanted.items()]
        try:
            for done, future in enumerate(as_completed(under_way), start=1):
                sent += future.result()
                say(f"{done} of {len(wanted)} files copied")
        finally:
            pool.shutdown(cancel_futures=True)
    last = folder / "manifest.json"
    digest = atomic_files.file_digest(last)
    return sent + _put(last, storage.join(url, "manifest.json"), digest, there.get("manifest.json"))


def _put(path: Path, url: str, sha256: str, there: int | None) -> bool:
    """Send a file unless an identical object exists, and return whether it was sent."""
    with _readable(path):
        right = path.stat().st_size == there and _digest(url) == sha256
        if right:
            return False
        if atomic_files.file_digest(path) != sha256:
            raise UserError("CORPUS", f"{path} is corrupt: its sha256 is not the manifest's",
                            "prepare the corpus again")
    for _ in range(AGAIN):
        storage.put(path, url)
        if storage.size(url) == path.stat().st_size and _digest(url) == sha256:
            return True
    raise UserError("--output", f"{url} arrived corrupt {AGAIN} times", "check whether other programs write there")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError("CORPUS", f"{path} cannot be read ({error.strerror})", "prepare the corpus again") from error


def _digest(url: str) -> str:
    with storage.open(url) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
