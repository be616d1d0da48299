"""The cache on the local disk: bounded, the longest unused goes first, and what others do to it does no harm."""

import os
import random
import threading
from pathlib import Path

import pytest

from jaxtrain.data.corpus.chunk_cache import ChunkCache

SIZE = 1000


def held(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*/*")}


def test_what_was_written_is_read(tmp_path):
    cache = ChunkCache(tmp_path / "deep/chunks", 10**6)
    assert cache.read("ab-1", 0, 1) is None
    cache.write("ab-1", b"0123456789")
    assert cache.read("ab-1", 2, 5) == b"234" and cache.read("ab-1", 0, 10) == b"0123456789"
    assert cache.read("ab-1", 8, 11) is None  # not as long
    assert ChunkCache(tmp_path / "deep/chunks", 10**6).read("ab-1", 0, 2) == b"01"


def test_the_longest_unused_goes_first(tmp_path):
    cache = ChunkCache(tmp_path, 8 * SIZE)
    for number in range(6):
        cache.write(f"{number:02}", bytes(SIZE))
        os.utime(tmp_path / f"{number:02}/{number:02}", ns=(0, number))
    assert cache.read("00", 0, 1)  # used just now
    cache.write("06", bytes(SIZE))
    cache.write("07", bytes(SIZE))
    assert held(tmp_path) == {"00", "02", "03", "04", "05", "06", "07"}


@pytest.mark.parametrize("processes", [1, 8])
def test_it_stays_within_its_limit(tmp_path, processes):
    limit = 128 * SIZE
    caches, rng = [ChunkCache(tmp_path, limit) for _ in range(processes)], random.Random(0)
    for number in range(500):
        rng.choice(caches).write(f"{number:04}", bytes(SIZE))
        if number % 50 == 49:
            assert len(held(tmp_path)) * SIZE <= limit
    assert len(held(tmp_path)) * SIZE > limit / 2


def test_one_that_holds_a_single_file_still_works(tmp_path):
    cache = ChunkCache(tmp_path, SIZE)
    for number in range(5):
        cache.write(f"{number:02}", bytes([number]) * SIZE)
        assert cache.read(f"{number:02}", 0, SIZE) == bytes([number]) * SIZE and len(held(tmp_path)) == 1


def test_many_threads_and_somebody_who_deletes(tmp_path):
    cache, wrong = ChunkCache(tmp_path, 20 * SIZE), []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(150):
            number = rng.randrange(50)
            got = cache.read(f"{number:02}", 0, SIZE)
            if got is None:
                cache.write(f"{number:02}", bytes([number]) * SIZE)
            elif got != bytes([number]) * SIZE:
                wrong.append(number)
            if rng.random() < 0.05:
                for path in tmp_path.glob("*/*"):
                    path.unlink(missing_ok=True)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(held(tmp_path)) <= 20


def test_what_a_kill_left_is_removed_in_its_turn(tmp_path):
    (tmp_path / "00").mkdir()
    (tmp_path / "00/00.abc.partial").write_bytes(bytes(SIZE))
    os.utime(tmp_path / "00/00.abc.partial", ns=(0, 0))
    cache = ChunkCache(tmp_path, 4 * SIZE)
    for number in range(4):
        cache.write(f"{number:02}", bytes(SIZE))
    assert "00.abc.partial" not in held(tmp_path) and "03" in held(tmp_path)


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    cache = ChunkCache(tmp_path / "file/chunks", SIZE)
    with pytest.warns(UserWarning) as warned:
        cache.write("00", b"1")
        cache.write("01", b"1")
    assert len(warned) == 1 and "cannot be written" in str(warned[0].message)
    assert cache.read("00", 0, 1) is None
