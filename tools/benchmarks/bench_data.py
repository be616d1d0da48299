"""Measure how fast text becomes a corpus and a corpus becomes batches, each beside other ways, in one run.

    python tools/benchmarks/bench_data.py --megabytes=100

The text is Python source and documentation: this interpreter's library and installed packages, again and again, a line
changed each time. Figures are by CPU time, of threads and children too, so by core, whatever else the machine does.
With datatrove installed, its tokenizer runs on the same file.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

from jaxtrain.config.schema import DataConfig
from jaxtrain.data import load_corpus
from jaxtrain.data.loading.batches import train_batches
from jaxtrain.data.prepare.prepare import Options, prepare

ROOT = Path(__file__).parents[2]
T, BATCH, ROWS = 4096, 8, 2000


def write_text(path: Path, size: int) -> None:
    """JSON lines of at least `size` bytes."""
    packages = Path(sysconfig.get_path("purelib"))
    sources = [path for end in ("py", "rst", "md") for path in sorted(packages.rglob(f"*.{end}"))]
    sources += sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
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
    """The least that could be done: read, encode, write ids. No hashes, no index, nothing made durable."""
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


def datatrove(text: Path, tokenizer: str, output: Path) -> None:
    """Run datatrove's pipeline for one worker, without the shuffle of documents."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps = [JsonlReader(str(text.parent), glob_pattern=text.name),
             DocumentTokenizer(str(output), tokenizer_name_or_path=tokenizer, eos_token="<|endoftext|>",
                               shuffle_documents=False)]
    LocalPipelineExecutor(steps, logging_dir=str(output / "logs"), skip_completed=False).run()


def seconds(f, *args) -> float:
    """Return the CPU seconds of a call."""
    start = cpu()
    f(*args)
    return cpu() - start


def cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def peak(text: Path, tokenizer: str, output: Path) -> float:
    """Memory at most of a process that prepares the text, in MiB."""
    script = """
import sys
from jaxtrain.data.prepare.prepare import Options, prepare
prepare([sys.argv[1]], sys.argv[3], Options(tokenizer=sys.argv[2]))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))"""
    done = subprocess.run([sys.executable, "-c", script, text, tokenizer, output], capture_output=True, text=True,
                          check=True)
    return int(done.stdout) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--config", default="configs/gpt.py", help="whose wait for data is measured")
    flags = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for everybody
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = {share: folder / f"{share}.jsonl" for share in (0.5, 1, 2)}
        for share, text in texts.items():
            write_text(text, int(share * flags.megabytes * 1e6))
        train_tokenizer(texts[1], folder / "tokenizer.json")
        print(f"{texts[1].stat().st_size / 1e6:.0f} MB of JSON lines; MB/s of one core")
        prepare_text(folder, texts[1], "bytes", "bytes", rounds=3)
        peaks = [f"{peak(text, 'bytes', folder / str(share)):.0f} of {text.stat().st_size / 1e6:.0f} MB"
                 for share, text in texts.items()]
        print(f"  memory at most, MiB: {', '.join(peaks)}", flush=True)
        read_rows(folder)
        read_by_grain(folder)
        pack_online(folder)
        wait_for_data(folder, flags.config)
        prepare_text(folder, texts[1], "BPE 32k", str(folder / "tokenizer.json"), rounds=1)


def prepare_text(folder: Path, text: Path, label: str, tokenizer: str, rounds: int) -> None:
    """MB of JSON lines a second, the best of so many rounds."""
    size = text.stat().st_size / 1e6
    ways = {"prepare": lambda i: prepare([str(text)], folder / (f"{label} {i}" if i else label),
                                         Options(tokenizer=tokenizer)),
            "plain loop": lambda i: plain(text, tokenizer, folder / "plain.bin")}
    if label != "bytes" and installed("datatrove", "orjson"):
        ways["datatrove"] = lambda i: datatrove(text, tokenizer, folder / "datatrove")
    times = {way: min(seconds(run, i) for i in range(rounds)) for way, run in ways.items()}
    ours = times.pop("prepare")
    print(f"  {label:<8} prepare {size / ours:7.2f}" + "".join(
        f"   {way} {size / spent:7.2f}, ratio {spent / ours:.2f}" for way, spent in times.items()), flush=True)


def installed(*packages: str) -> bool:
    """Whether they can be imported."""
    try:
        for package in packages:
            __import__(package)
    except ImportError:
        return False
    return True


def read_rows(folder: Path) -> None:
    """Rows in shuffled order, each read once."""
    print(f"{ROWS:,} shuffled rows of {T:,} tokens in batches of {BATCH}; million tokens/s of one core, best of 3")
    for packing in ("concat", "best_fit"):
        config = DataConfig(source=str(folder / "bytes"), cache_dir=str(folder), seq_len=T, global_batch_size=BATCH,
                            packing=packing)
        corpus = load_corpus(config)
        batches, tokens = train_batches(config, corpus), corpus.train.shards[0]
        random = np.random.default_rng(0)

        def starts(tokens=tokens, random=random):
            return random.integers(0, max(1, len(tokens.tokens) - T - 1), BATCH).tolist()

        def ours(first, batches=batches):
            for step in range(first, first + ROWS // BATCH):
                batches[step]

        def memmap(first, tokens=tokens, starts=starts):
            for _ in range(ROWS // BATCH):
                np.stack([tokens.tokens[start: start + T + 1] for start in starts()]).astype(np.int32)

        def same_arrays(first, tokens=tokens, starts=starts):
            for _ in range(ROWS // BATCH):
                rows = [one_row(tokens.tokens, tokens.offsets, start) for start in starts()]
                _ = [np.stack(column) for column in zip(*rows, strict=True)]

        mine, least, same = (min(seconds(way, n * ROWS // BATCH) for n in range(3))
                             for way in (ours, memmap, same_arrays))
        rate = {way: ROWS * T / spent / 1e6
                for way, spent in (("batches", mine), ("memmap", least), ("same", same))}
        print(f"  {packing:<8} batches {rate['batches']:6.1f}   plain memmap (ids only) {rate['memmap']:6.1f}, ratio "
              f"{rate['batches'] / rate['memmap']:.2f}   plain loop (the same five arrays) {rate['same']:6.1f}, ratio "
              f"{rate['batches'] / rate['same']:.2f}", flush=True)


def one_row(tokens: np.ndarray, offsets: np.ndarray, start: int) -> tuple[np.ndarray, ...]:
    """Return the arrays of a batch, computed in the plainest way: tokens, targets, segments, positions, weights."""
    text = tokens[start: start + T + 1].astype(np.int32)
    begins = offsets[np.searchsorted(offsets, start + 1): np.searchsorted(offsets, start + T, "right")] - start
    weights = np.ones(T, np.float32)
    weights[begins - 1] = 0
    edges = np.concatenate([[0], begins[begins < T], [T]])
    lengths = np.diff(edges)
    segments = np.repeat(np.arange(1, len(edges), dtype=np.int32), lengths)
    positions = (np.arange(T) - np.repeat(edges[:-1], lengths)).astype(np.int32)
    return text[:-1], text[1:], segments, positions, weights


def read_by_grain(folder: Path) -> None:
    """Batches as they are read, through the iterator of a run, and by Grain's own transformations, row by row."""
    from grain import MapDataset

    from jaxtrain.data import PackedRows, prefetch

    print(f"{ROWS:,} rows in batches; thousand rows/s of one core, best of 5")
    for length, size in ((T, BATCH), (T // 4, 4 * BATCH)):
        config = DataConfig(source=str(folder / "bytes"), cache_dir=str(folder), seq_len=length, global_batch_size=size)
        corpus, steps = load_corpus(config), ROWS // size
        batches = train_batches(config, corpus)
        theirs = MapDataset.source(PackedRows(corpus.train, length)).seed(config.seed).shuffle().repeat().batch(size)

        def iterate(first, batches=batches, steps=steps):
            with prefetch(batches, first, first + steps, lambda step, batch: batch, 2) as stream:
                for _ in stream:
                    pass

        def read(first, source=batches, steps=steps):
            for step in range(first, first + steps):
                source[step]

        def read_theirs(first, read=read, theirs=theirs):
            read(first, theirs)

        iterate(0)  # imports Grain
        ways = {"read": read, "prefetched by Grain": iterate, "Grain's own shuffle, repeat and batch": read_theirs}
        rates = {way: [] for way in ways}
        for n in range(5):
            for way, function in ways.items():
                rates[way].append(steps * size / seconds(function, n * steps) / 1e3)
        told = "   ".join(f"{way} {max(found):.1f}" for way, found in rates.items())
        print(f"  {size} x {length:,}  {told}", flush=True)


def pack_online(folder: Path) -> None:
    """Grain's packing while reading, of the same documents; longer ones are cut to rows before."""
    from grain import MapDataset, ReadOptions, experimental

    corpus = load_corpus(DataConfig(source=str(folder / "bytes"), cache_dir=str(folder)))
    shard = corpus.train.shards[0]
    ends = shard.offsets[: 1 + np.searchsorted(shard.offsets, ROWS * T)]
    pieces = [{"tokens": shard.tokens[at: min(at + T, stop)].astype(np.int32)}
              for start, stop in itertools.pairwise(ends.tolist()) for at in range(start, stop, T)]
    size = sum(len(piece["tokens"]) for piece in pieces)
    print(f"Grain's online packing of {size / 1e6:.1f} million tokens; million tokens/s of one core")
    ways = {"ConcatThenSplit": lambda data: experimental.ConcatThenSplitIterDataset(data, length_struct={"tokens": T}),
            "FirstFit": lambda data: experimental.FirstFitPackIterDataset(
                data, length_struct={"tokens": T}, num_packing_bins=64),
            "BestFit": lambda data: experimental.BestFitPackIterDataset(
                data, length_struct={"tokens": T}, num_packing_bins=64)}
    for way, packed in ways.items():
        data = MapDataset.source(pieces).shuffle(0).to_iter_dataset(ReadOptions(num_threads=0, prefetch_buffer_size=0))
        rows: list[dict] = []
        spent = seconds(lambda data=data, packed=packed, rows=rows: rows.extend(packed(data)))
        fill = sum(int((row["tokens_segment_ids"] > 0).sum()) for row in rows) / (T * len(rows))
        print(f"  {way:<16} {size / spent / 1e6:6.1f}   full to {fill:.2%}", flush=True)


def wait_for_data(folder: Path, config: str) -> None:
    """The share of the time of steps that a run waits for data."""
    subprocess.run([sys.executable, "-m", "jaxtrain.main", f"--config={config}", "--config.train.steps=60",
                    "--config.train.log_every=1", f"--workdir={folder / 'run'}"], cwd=ROOT, check=True,
                   capture_output=True, env=os.environ | {"JAXTRAIN_CACHE": str(folder / "cache")})
    with open(folder / "run" / "metrics.jsonl") as file:
        lines = [line for line in map(json.loads, file) if line.get("data_wait_s") is not None and line["step_time_s"]]
    wait, step = (sum(line[name] for line in lines) for name in ("data_wait_s", "step_time_s"))
    print(f"{config}: {len(lines)} steps, {step:.1f} s, waited for data {wait / step:.3%} of it")


if __name__ == "__main__":
    main()
