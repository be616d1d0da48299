"""Copy a corpus to object storage, from where training can read it.

    jaxtrain publish corpora/stored memory://bucket/stored
    jaxtrain publish corpora/own s3://BUCKET/own

Every object is read back and compared before the manifest is written, which is the last: until then there is no corpus.
Killed at any moment, the same command goes on; what is there and right is not sent again.
"""

import hashlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from jaxtrain import storage
from jaxtrain.data.corpus import atomic_files
from jaxtrain.data.corpus.corpus import SPLITS
from jaxtrain.data.corpus.open import read_manifest
from jaxtrain.data.prepare.prepare_progress import Line
from jaxtrain.errors import UserError
from jaxtrain.flags import command, parser_of

THREADS = 8  # files under way at a time
AGAIN = 3  # times a file is sent that does not arrive as it is


def publish(corpus: str | Path, url: str, say=lambda line: None) -> int:
    """-> how many files were sent."""
    if not storage.is_url(url):
        raise UserError("URL", f"{url!r} is none", "name one as s3://bucket/name")
    folder = Path(corpus).expanduser()
    manifest = read_manifest(folder)
    there = {found.name: found.size for found in storage.find(url)} if storage.exists(url) else {}
    if "manifest.json" in there and read_manifest(url)["sha256"] != manifest["sha256"]:
        raise UserError("URL", f"{url} holds another corpus", "name another place, or delete it")
    wanted = {name: sha256 for split in SPLITS for shard in manifest["splits"][split]["shards"]
              for name, sha256 in shard["sha256"].items()}
    if file := manifest["tokenizer"]["file"]:
        with _readable(folder / file):
            wanted[file] = atomic_files.file_digest(folder / file)
    sent = 0
    with ThreadPoolExecutor(THREADS) as pool:
        under_way = [pool.submit(_put, folder / name, storage.join(url, name), sha256, there.get(name))
                     for name, sha256 in wanted.items()]
        try:
            for done, future in enumerate(as_completed(under_way), start=1):
                sent += future.result()
                say(f"{done} of {len(wanted)} files are there")
        finally:
            pool.shutdown(cancel_futures=True)
    last = folder / "manifest.json"
    digest = atomic_files.file_digest(last)
    return sent + _put(last, storage.join(url, "manifest.json"), digest, there.get("manifest.json"))


def _put(path: Path, url: str, sha256: str, there: int | None) -> bool:
    """Whether it had to be sent."""
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
    raise UserError("URL", f"{url} is not what was sent, {AGAIN} times", "see whether others write there")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError("CORPUS", f"{path} cannot be read ({error.strerror})", "prepare the corpus again") from error


def _digest(url: str) -> str:
    with storage.open(url) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


@command("stopped; the same command goes on")
def main(argv: list[str] | None) -> None:
    """Exit status 0: all of it is there; 2: the user's mistake, in one line."""
    parser = parser_of("publish", __doc__)
    parser.add_argument("corpus", help="a folder that jaxtrain prepare made")
    parser.add_argument("url", help="where to; then give it to a run as --config.data.source")
    flags = parser.parse_args(argv)
    with Line(sys.stderr) as say:
        sent = publish(flags.corpus, flags.url, say)
    print(f"{flags.url}: complete; {sent} files were sent")


if __name__ == "__main__":
    sys.exit(main())
