"""Compare the ids of the faster engine for byte-level BPE with those of `tokenizers`, and how fast both are.

    python tools/benchmarks/bench_tokenizers.py --tokenizer=PATH [--gigabytes=1] [--texts=FOLDER,...] [--seed=0]

Documents are drawn from a seed: pieces of the text files of these folders (default: this interpreter's packages, its
library and /usr/share), a third of them files of other scripts than Latin; pieces of bytes that begin and end inside of
characters; and drawn words of every character, marks, emoji, digits and long runs. Each document is encoded by
both engines, one thread each, in turns, and each difference of ids is a failure where `prepare` would use the engine.
Rates are by CPU time, so by core. Exit status 1: ids differ.
"""

import argparse
import itertools
import os
import random
import sys
import sysconfig
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for both

from jaxtrain.data.tokenizers import fast_encoding
from jaxtrain.data.tokenizers.tokenizer import JsonTokenizer, load_tokenizer

ENDINGS = {".py", ".pyi", ".md", ".rst", ".txt", ".json", ".js", ".css", ".html", ".c", ".h", ".po", ".mo", ".tex",
           *(f".{n}" for n in range(1, 9))}  # man pages
LARGEST = 2**23  # bytes of a file: tables of data are not text
BATCH = 2**19  # characters that are encoded at once
EMOJI = ["\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u2764\ufe0f", "\U0001f1e9\U0001f1ea", "1\ufe0f\u20e3",
         "\U0001f44d\U0001f3fd", "\U0001f3f4\U000e0067\U000e0062\U000e007f"]
SPACES = [chr(point) for point in range(0x3001) if chr(point).isspace()] + ["\u200b", "\ufeff", "\u180e", "\r\n"]
SHORT = ["'s", "'S", "'ll", "'RE", "'\u017f", "\u2019t", "n't", "o'clock", "''", "'d've", "'m"]


@dataclass
class Texts:
    """The text files of folders, those of other scripts apart from those in mere ASCII."""

    ascii: list[tuple[Path, int]] = field(default_factory=list)
    scripts: list[tuple[Path, int]] = field(default_factory=list)

    @classmethod
    def found(cls, folders: list[Path]) -> "Texts":
        """Read all of them once: of files with the same name and size, one."""
        texts, seen = cls(), set()
        for folder in folders:
            for path in sorted(folder.rglob("*")):
                if path.suffix not in ENDINGS or path.is_symlink() or not path.is_file():
                    continue
                size = path.stat().st_size
                if not 0 < size <= LARGEST or (path.name, size) in seen:
                    continue
                seen.add((path.name, size))
                content = np.frombuffer(path.read_bytes(), np.uint8)
                (texts.scripts if (content > 127).mean() > 0.05 else texts.ascii).append((path, size))
        return texts


def documents(texts: Texts, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of documents without end, from a seed."""
    draw = random.Random(seed)
    unknown, _ = fast_encoding.characters()
    by_kind: dict[str, list[str]] = {}
    for point in np.flatnonzero(~unknown).tolist():  # unassigned ones among those that are
        if (category := unicodedata.category(chr(point))) != "Cs":
            by_kind.setdefault(category, []).append(chr(point))
    weights = {pool: list(itertools.accumulate(size for _, size in getattr(texts, pool))) for pool in POOLS}
    kinds = [kind for kind, (share, _) in KINDS.items() for _ in range(share)]
    while True:
        kind = draw.choice(kinds)
        pool = KINDS[kind][1]
        yield kind, drawn(draw, by_kind) if pool is None else piece(draw, getattr(texts, pool), weights[pool], kind)


POOLS = ("ascii", "scripts")
KINDS = {"ASCII": (35, "ascii"), "other scripts": (35, "scripts"), "cut bytes": (10, "scripts"),
         "mixed": (10, "scripts"), "drawn": (10, None)}  # shares of documents, by hundred


def piece(draw: random.Random, files: list[tuple[Path, int]], weights: list[int], kind: str) -> str:
    """Return a piece of a file: from the beginning of a line, or for `cut bytes` from any byte to any byte."""
    path, size = draw.choices(files, cum_weights=weights)[0]
    length = min(size, int(draw.lognormvariate(8.5, 1)))
    with open(path, "rb") as file:
        file.seek(draw.randrange(size - length + 1))
        content = file.read(length)
    text = content.decode(errors="replace")
    if kind == "mixed":  # words of the piece in another order, with other spaces and cases between
        words = text.split()
        draw.shuffle(words)
        return "".join(draw.choice((str, str.upper, str.title))(word) + draw.choice((" ", " ", *SPACES, *SHORT))
                       for word in words)
    return text if kind == "cut bytes" else text.partition("\n")[2]


def drawn(draw: random.Random, by_kind: dict[str, list[str]]) -> str:
    """Return drawn words: of one kind of character or of several, with marks, runs, digits and odd spaces."""
    kinds = sorted(by_kind)

    def one(kind: str = "") -> str:
        return draw.choice(by_kind[kind or draw.choice(kinds)])

    def near() -> str:  # of one script: characters beside each other
        first = ord(one(draw.choice(("Ll", "Lu", "Lo", "Lo", "Lo", "Mn", "Nd"))))
        around = [chr(first + n) for n in range(draw.randint(1, 60)) if first + n < 0x110000]
        usable = [found for found in around if unicodedata.category(found) not in ("Cn", "Cs")]  # the first, at least
        return "".join(draw.choices(usable, k=draw.randint(1, 12)))

    makers: list[Callable[[], str]] = [
        near, near, near, lambda: "".join(one() for _ in range(draw.randint(1, 6))),
        lambda: one(draw.choice(("Ll", "Lo"))) + "".join(one("Mn") for _ in range(draw.randint(1, 9))),
        lambda: draw.choice(EMOJI), lambda: draw.choice(SHORT),
        lambda: "".join(draw.choices("0123456789", k=draw.randint(1, 30))),
        lambda: "".join(one(draw.choice(("Nd", "Nl", "No"))) for _ in range(draw.randint(1, 8))),
        lambda: draw.choice((one(), " ", "\n", "\t", "=", "-", "a", "0")) * draw.choice((2, 3, 17, 100, 1000)),
        lambda: draw.choice(SPACES) * draw.randint(1, 9), lambda: "<|endoftext|>",
        lambda: "\ufffd" * draw.randint(1, 4)]
    words = [draw.choice(makers)() + draw.choice(("", " ", " ", draw.choice(SPACES)))
             for _ in range(draw.randint(0, 300))]
    if draw.random() < 0.02:  # not assigned, and far from what is
        words.append(chr(draw.randrange(0x30000, 0xE0000)) + "s")
    return "".join(words)


@dataclass
class Tally:
    """The counts of what was encoded, how long it took, and what differed."""

    bytes: int = 0
    documents: Counter = field(default_factory=Counter)
    left: Counter = field(default_factory=Counter)  # documents that `prepare` leaves to the library
    differ: Counter = field(default_factory=Counter)  # of the others
    told_apart: int = 0  # documents with other ids among those that are left
    seconds: Counter = field(default_factory=Counter)


def compare(tokenizer: JsonTokenizer, texts: Texts, size: int, seed: int) -> Tally | None:
    """Encode so many bytes by both engines; None: the faster one is not used for this tokenizer."""
    fast = fast_encoding.fast_encoder(tokenizer._described, tokenizer._ids)
    if fast is None:
        return None
    tally, stream, told = Tally(), documents(texts, seed), time.monotonic()
    while tally.bytes < size:
        kinds, batch, length = [], [], 0
        while length < BATCH:
            kind, text = next(stream)
            kinds.append(kind)
            batch.append(text)
            length += len(text) + 1
        one_batch(tokenizer, fast, kinds, batch, tally)
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(f"  {tally.bytes / 1e6:,.0f} MB, {tally.differ.total()} differ", file=sys.stderr, flush=True)
    return tally


def one_batch(tokenizer: JsonTokenizer, fast: fast_encoding.FastEncoder, kinds: list[str], batch: list[str],
              tally: Tally) -> None:
    """Encode documents by both, and count."""
    size = sum(len(text.encode()) for text in batch)
    tally.bytes += size
    wanted = timed(tally, "tokenizers", lambda: tokenizer._ids(batch))
    sure = timed(tally, "gate", lambda: fast.sure(batch))
    mine = [text for text, is_sure in zip(batch, sure, strict=True) if is_sure]
    found = iter(timed(tally, "engine", lambda: fast._ids(mine)))
    others = [text for text, is_sure in zip(batch, sure, strict=True) if not is_sure]
    unsure = iter(fast._ids(others))
    timed(tally, "left", lambda: tokenizer._ids(others))
    fast.count(sum(map(len, batch)))
    for kind, text, is_sure, want in zip(kinds, batch, sure, wanted, strict=True):
        got = next(found if is_sure else unsure)
        tally.documents[kind] += 1
        tally.left[kind] += not is_sure
        if np.array_equal(got, want):
            continue
        if not is_sure:
            tally.told_apart += 1
            continue
        tally.differ[kind] += 1
        if tally.differ.total() <= 5:
            print(f"  other ids ({kind}): {around(tokenizer, text, got, want)}", flush=True)


def around(tokenizer: JsonTokenizer, text: str, got: np.ndarray, want: np.ndarray) -> str:
    """Return the text at the first difference."""
    same = next((place for place, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1]),
                min(len(got), len(want)))
    begin = tokenizer.count_bytes(want[:same])
    content = text.encode()
    return (f"{content[max(0, begin - 40):begin].decode(errors='replace')!r} then "
            f"{content[begin:begin + 40].decode(errors='replace')!r}, {got[same:same + 6].tolist()} for "
            f"{want[same:same + 6].tolist()}")


def timed(tally: Tally, name: str, call: Callable):
    """Call, and add its CPU time."""
    began = time.process_time()
    result = call()
    tally.seconds[name] += time.process_time() - began
    return result


def report(name: str, tally: Tally) -> None:
    """Print a row of figures, and what was left and what differed."""
    size, seconds = tally.bytes / 1e6, tally.seconds
    ours = seconds["gate"] + seconds["engine"] + seconds["left"]
    print(f"{name}: {size:,.0f} MB, {tally.documents.total():,} documents; MB/s of one core: tokenizers "
          f"{size / seconds['tokenizers']:.2f}, as prepare encodes {size / ours:.2f} "
          f"(ratio {seconds['tokenizers'] / ours:.1f}: {seconds['engine']:.1f} s of the engine, {seconds['left']:.1f} "
          f"of tokenizers for what is left to it, {seconds['gate']:.1f} of the gate)")
    for kind, count in sorted(tally.documents.items()):
        print(f"  {kind}: {count:,} documents, {tally.left[kind] / count:.2%} left to tokenizers, "
              f"{tally.differ[kind]} of the others with other ids")
    print(f"  {tally.told_apart} of the documents left to tokenizers have other ids by the engine", flush=True)


def main() -> int:
    """Compare for each tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", action="append", required=True, help="a tokenizer.json, or its folder; repeat")
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", default="", metavar="FOLDER,...", help="folders with text files")
    parser.add_argument("--eod", default="", help="the token that ends a document, if its name is not well known")
    flags = parser.parse_args()
    folders = [Path(folder) for folder in flags.texts.split(",") if folder] or [
        Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib")), Path("/usr/share")]
    texts = Texts.found(folders)
    print("; ".join(f"{pool}: {len(files):,} files, {sum(size for _, size in files) / 1e6:,.0f} MB"
                    for pool in POOLS for files in [getattr(texts, pool)]), flush=True)
    differ = 0
    for name in flags.tokenizer:
        tokenizer = load_tokenizer(name, flags.eod)
        assert isinstance(tokenizer, JsonTokenizer), f"{name} is not a tokenizer.json"
        tally = compare(tokenizer, texts, int(flags.gigabytes * 1e9), flags.seed)
        if tally is None:
            print(f"{name}: left to tokenizers", flush=True)
            continue
        report(name, tally)
        differ += tally.differ.total()
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
