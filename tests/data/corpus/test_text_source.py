import hashlib
import os
import sysconfig
from pathlib import Path

import pytest

from jaxtrain.data import find_documents
from jaxtrain.errors import UserError
from tests.odd_files import in_time


def write(root: Path, files: dict[str, bytes]) -> str:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return str(root)


def splits(documents) -> dict[str, str]:
    return {document.name: document.split for document in documents}


def test_stdlib_is_the_running_library_without_tests_and_packages():
    documents = find_documents("stdlib", 0.05)
    names = [document.name for document in documents]
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    unwanted = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    assert not [name for name in names if unwanted & set(Path(name).parts[:-1]) or not name.endswith(".py")]
    assert names == sorted(set(names))
    here = Path(sysconfig.get_path("stdlib"))
    assert all(document.path.is_relative_to(here) for document in documents)
    sizes = {split: sum(d.split == split for d in documents) for split in ("train", "eval")}
    assert 0.02 < sizes["eval"] / len(documents) < 0.1
    assert find_documents("stdlib", 0.05) == documents


def test_split_is_by_file_by_name_only_and_stable_when_files_come_and_go(tmp_path):
    files = {f"d{i % 3}/f{i}.txt": b"text %d" % i for i in range(200)}
    before = splits(find_documents(write(tmp_path / "a", files), 0.2))
    assert set(before) == set(files)
    assert 20 < sum(split == "eval" for split in before.values()) < 60
    elsewhere = {name: b"other " + content for name, content in files.items() if not name.endswith("7.txt")}
    after = splits(find_documents(write(tmp_path / "b", elsewhere | {"new.txt": b"new"}), 0.2))
    assert {name: after[name] for name in elsewhere} == {name: before[name] for name in elsewhere}
    wider = splits(find_documents(str(tmp_path / "a"), 0.4))
    assert {name for name in before if before[name] == "eval"} < {name for name in wider if wider[name] == "eval"}


def test_folder_takes_text_and_leaves_the_rest(tmp_path):
    source = write(tmp_path, {"b.txt": b"b", "a/c.md": "é".encode(), "z": b"no suffix", ".hidden": b"h", ".git/x": b"x",
                              "late.bin": b"a" * 8191 + b"\0", "latin.txt": b"\xe9t\xe9", "empty.txt": b""})
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling.txt")
    documents = find_documents(source, 0.5)
    assert [document.name for document in documents] == ["a/c.md", "b.txt", "z"]
    assert [document.read() for document in documents] == ["é".encode(), b"b", b"no suffix"]
    assert documents[1].sha256 == hashlib.sha256(b"b").hexdigest()


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_neither_split_is_ever_empty(tmp_path, fraction):
    documents = find_documents(write(tmp_path, {"a": b"a", "b": b"b"}), fraction)
    assert {document.split for document in documents} == {"train", "eval"}


@pytest.mark.parametrize(("content", "fraction", "train"), [
    (b"one\ntwo\nthree\nfour\n", 0.25, b"one\ntwo\nthree\n"),
    (b"aa\nb\nc\n", 0.57, b"aa\n"),  # the wanted place is right behind a line
    (b"one\ntwo", 0.1, b"one\n"),  # no line ends behind the wanted place: the last before it
    (b"0123456789", 0.2, b"01234567"),
    ("aéé".encode(), 0.2, "aé".encode()),
    (b"ab", 0.001, b"a"),
    (b"ab", 0.999, b"a"),
])
def test_one_file_is_cut_at_a_line(tmp_path, content, fraction, train):
    write(tmp_path, {"only.txt": content})
    documents = find_documents(str(tmp_path / "only.txt"), fraction)
    assert [document.split for document in documents] == ["train", "eval"]
    assert [document.read() for document in documents] == [train, content[len(train):]]
    assert find_documents(str(tmp_path), fraction) == documents  # a folder with one file is that file


def test_mistakes_are_told(tmp_path):
    for source, said in [(str(tmp_path / "absent"), "does not exist"),
                         (write(tmp_path / "empty", {"a": b"", ".b": b"b"}), "holds no text"),
                         (write(tmp_path / "binary", {"a": b"\0\1"}), "holds no text"),
                         (write(tmp_path / "chats", {"a.jsonl": b"{}\n", "b.jsonl": b"{}\n"}), "jaxtrain prepare"),
                         (str(tmp_path / "chats" / "a.jsonl"), "holds records"),
                         (write(tmp_path / "array", {"a.json": b' [{"text": 1}]', "b.jsonl": b"{}"}), "holds records"),
                         (write(tmp_path / "one", {"a": b"a"}), "too short")]:
        with pytest.raises(UserError, match=said) as caught:
            find_documents(source, 0.1)
        assert caught.value.key == "data.source"


def test_a_sparse_file_is_not_read_into_memory(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n")
    os.truncate(tmp_path / "a.txt", 2**40)
    with pytest.raises(UserError, match=r"a.txt has 1,099,511,627,776 bytes, more than this machine's memory"):
        in_time(lambda: find_documents(str(tmp_path), 0.1))


def test_a_file_edited_after_it_was_listed_is_an_error(tmp_path):
    document = find_documents(write(tmp_path, {"a": b"aaa", "b": b"bbb"}), 0.5)[0]
    document.path.write_bytes(b"abc")
    with pytest.raises(UserError, match="changed"):
        document.read()
