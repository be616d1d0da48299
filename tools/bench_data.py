"""How fast text becomes a corpus and a corpus becomes batches, each beside the plainest way, in one run.

    python tools/bench_data.py --megabytes=100

The text is Python source: this interpreter's library and installed packages, again and again, a line changed each time.
"""

import argparse
import itertools
import json
import resource
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np

from jaxtrain.config import DataConfig
from jaxtrain.data import load_corpus
from jaxtrain.data.batches import train_batches
from jaxtrain.data.prepare import Options, prepare

ROWS = 2000


def write_text(path: Path, size: int) -> None:
    """JSON lines of at least `size` bytes."""
    sources = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")) + sorted(
        Path(sysconfig.get_path("stdlib")).glob("*.py"))
    written, round_ = 0, 0
    with open(path, "w") as file:
        while written < size:
            for source in sources:
                line = json.dumps({"text": f"# copy {round_}\n" + source.read_text(errors="replace")}) + "\n"
                written += file.write(line)
                if written >= size:
                    return
            round_ += 1


def train_tokenizer(text: Path, path: Path) -> None:
    """A byte-level BPE of 32,000 tokens, on the first documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=32_000, special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    with open(text) as file:
        tokenizer.train_from_iterator([json.loads(line)["text"] for line in itertools.islice(file, 800)], trainer)
    tokenizer.save(str(path))


def plain(text: Path, tokenizer: str, output: Path) -> None:
    """The least that could be done: read, encode, write ids."""
    if tokenizer == "bytes":
        def encode(texts):
            return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]
    else:
        from tokenizers import Tokenizer

        loaded = Tokenizer.from_file(tokenizer)

        def encode(texts):
            return [np.array(one.ids, np.uint16) for one in loaded.encode_batch_fast(texts, add_special_tokens=False)]

    with open(text) as file, open(output, "wb") as out:
        batch = []
        for line in file:
            batch.append(json.loads(line)["text"])
            if len(batch) == 256:
                out.write(b"".join(ids.tobytes() for ids in encode(batch)))
                batch = []
        out.write(b"".join(ids.tobytes() for ids in encode(batch)))


def seconds(f, *args) -> float:
    start = time.perf_counter()
    f(*args)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=100)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.jsonl"
        write_text(text, int(flags.megabytes * 1e6))
        size = text.stat().st_size / 1e6
        train_tokenizer(text, folder / "tokenizer.json")
        print(f"{size:.0f} MB of JSON lines; MB/s, one process (the tokenizer may use threads)")
        for label, tokenizer in (("bytes", "bytes"), ("BPE 32k", str(folder / "tokenizer.json"))):
            ours = seconds(prepare, [str(text)], folder / label, Options(tokenizer=tokenizer))
            least = seconds(plain, text, tokenizer, folder / "plain.bin")
            print(f"  {label:<8} prepare {size / ours:7.2f}   plain loop {size / least:7.2f}   "
                  f"ratio {least / ours:.2f}")
        print(f"  memory at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
        read_rows(folder)


def read_rows(folder: Path) -> None:
    """Rows of 4,096 tokens in shuffled order, in millions of tokens a second on one thread."""
    print(f"{ROWS:,} shuffled rows of 4,096 tokens; million tokens/s, one thread")
    order = np.random.default_rng(0)
    for packing in ("concat", "best_fit"):
        config = DataConfig(source=str(folder / "bytes"), cache_dir=str(folder), seq_len=4096, global_batch_size=8,
                            packing=packing)
        corpus = load_corpus(config)
        batches = train_batches(config, corpus)
        flat = np.memmap(next((folder / "bytes").glob("train-*.bin")), np.uint16, mode="r")
        starts = order.integers(0, len(flat) - 4097, ROWS)

        def memmap(starts=starts, flat=flat):
            for step in range(ROWS // 8):
                np.stack([flat[start: start + 4097] for start in starts[8 * step: 8 * step + 8]]).astype(np.int32)

        def ours(batches=batches):
            for step in range(ROWS // 8):
                batches[step]

        times = [(seconds(ours), seconds(memmap)) for _ in range(3)]
        mine, least = (min(column) for column in zip(*times, strict=True))
        print(f"  {packing:<8} batches {ROWS * 4096 / mine / 1e6:6.1f}   "
              f"plain memmap {ROWS * 4096 / least / 1e6:6.1f}   ratio {least / mine:.2f}")


if __name__ == "__main__":
    main()
