"""Plan, seek and trace documents in a corpus of very many documents, of which only the sizes are there.

    python tools/benchmarks/bench_index.py --documents=1e9 --folder=/scratch

Lengths are log-normal, in shards of up to a million documents; tokens are zeros that take no room. The bound of the
address space counts everything that is mapped, too.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from jaxtrain.data import Batches, BucketedBatches, DocumentRows, PackedRows, Tokens
from jaxtrain.data.corpus.corpus import Shard
from jaxtrain.data.loading.bucketing import choose
from jaxtrain.data.packing.best_fit import cached_plan
from jaxtrain.data.packing.packed_rows import FittedRows
from jaxtrain.data.tracing.inverse_batches import sightings
from jaxtrain.data.tracing.stretches import Stretch

SEEKS = 1000


def write_sizes(folder: Path, documents: int, per_shard: int) -> None:
    """The offsets of each shard, as `prepare` would write them."""
    for shard, start in enumerate(range(0, documents, per_shard)):
        rng = np.random.default_rng([0, shard])
        lengths = np.exp(5.5 + 1.2 * rng.standard_normal(min(per_shard, documents - start), np.float32)).astype("<i8")
        np.save(folder / f"{shard:06}.npy", np.concatenate([[0], np.cumsum(np.maximum(lengths, 2))]))


def open_sizes(folder: Path) -> Tokens:
    """Documents of these sizes, without their tokens."""
    offsets = [np.asarray(np.load(path, mmap_mode="r")) for path in sorted(folder.glob("*.npy"))]
    return Tokens(tuple(Shard(np.broadcast_to(np.uint16(0), some[-1]), some) for some in offsets), 0)


def peak() -> str:
    """Memory at most, mapped files that were touched included."""
    return f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"


def seek(rows, seq_len: int) -> str:
    """Time of a batch at any step."""
    batches = Batches(rows, global_batch_size=8, seed=0)
    times = []
    for step in np.random.default_rng(0).integers(0, 10**9, SEEKS).tolist():
        start = time.perf_counter()
        batch = batches[step]
        times.append(time.perf_counter() - start)
        assert batch["tokens"].shape == (8, seq_len)
    return (f"a batch of 8 at any step below 10^9: median {np.median(times) * 1e3:.2f} ms, "
            f"99 % {np.quantile(times, 0.99) * 1e3:.2f} ms")


def trace(batches, tokens: Tokens, documents: int) -> str:
    """Time of finding all steps of three epochs that see some documents; each is looked up in its batch."""
    rng, places = np.random.default_rng(1), []
    for number in rng.integers(0, tokens.num_documents, documents).tolist():
        shard = int(np.searchsorted(tokens.first_documents, number, "right")) - 1
        at, before = number - tokens.first_documents[shard], tokens.shard_start(shard)
        places.append((tokens.shards[shard].offsets[at: at + 2] + before).tolist())
    stretches = [Stretch("", start, stop) for start, stop in places]
    steps = int(3 / batches.epochs(1)[""])
    start = time.perf_counter()
    found = list(sightings(batches, stretches, steps))
    took = time.perf_counter() - start
    for one in found[:: max(1, len(found) // SEEKS)]:
        assert batches.origin(one.batch, one.row)[2] == one.span.row
    return (f"{documents:,} documents traced through {steps:,} steps (3 epochs) in {took:.3f} s: "
            f"{len(found):,} rows, {len({one.batch for one in found}):,} steps")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=float, default=1e7)
    parser.add_argument("--per_shard", type=float, default=1e6)
    parser.add_argument("--seq_len", type=int, default=4096)
    parser.add_argument("--bucketed", type=float, default=1e8, help="most documents for which `bucket` is tried: its "
                        "rows are in memory, 16 bytes a document and more")
    parser.add_argument("--memory_gib", type=float, default=24, help="bound of the address space")
    parser.add_argument("--folder", help="where there is room for 16 bytes a document")
    flags = parser.parse_args()
    bound = int(flags.memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    with tempfile.TemporaryDirectory(dir=flags.folder) as name:
        folder = Path(name)
        start = time.perf_counter()
        write_sizes(folder, int(flags.documents), int(flags.per_shard))
        print(f"sizes of {flags.documents:,.0f} documents written in {time.perf_counter() - start:.1f} s", flush=True)
        start = time.perf_counter()
        tokens = open_sizes(folder)
        rows = PackedRows(tokens, flags.seq_len)
        print(f"{len(tokens.shards):,} shards, {tokens.num_tokens:,} tokens")
        print(f"concat: {len(rows):,} rows, planned in {time.perf_counter() - start:.2f} s, {peak()}")
        print(f"  {seek(rows, flags.seq_len)}, {peak()}", flush=True)
        for documents in (1, 1000):
            print(f"  {trace(Batches(rows, global_batch_size=8, seed=0), tokens, documents)}, {peak()}", flush=True)
        start = time.perf_counter()
        plan = cached_plan(tokens, flags.seq_len, folder / "plans", "sizes")
        print(f"best_fit: {len(plan):,} rows, planned in {time.perf_counter() - start:.2f} s, {peak()}")
        size = sum(path.stat().st_size for path in (folder / "plans").iterdir())
        print(f"  full to {plan.fill:.4%}, {plan.cut:,} documents cut; "
              f"{size / flags.documents:.1f} bytes a document on disk")
        start = time.perf_counter()
        plan = cached_plan(tokens, flags.seq_len, folder / "plans", "sizes")
        print(f"  opened again in {time.perf_counter() - start:.3f} s")
        fitted = FittedRows(tokens, plan, flags.seq_len)
        print(f"  {seek(fitted, flags.seq_len)}, {peak()}")
        for documents in (1, 1000):
            print(f"  {trace(Batches(fitted, global_batch_size=8, seed=0), tokens, documents)}, {peak()}", flush=True)
        if flags.documents > flags.bucketed:
            return
        start = time.perf_counter()
        rows = DocumentRows(tokens, flags.seq_len)
        bucketed = BucketedBatches(rows, buckets=choose(rows.lengths, 8, 64), global_batch_size=8, seed=0)
        print(f"bucket: {len(rows.lengths):,} rows, planned in {time.perf_counter() - start:.2f} s, {peak()}")
        for documents in (1, 1000):
            print(f"  {trace(bucketed, tokens, documents)}, {peak()}", flush=True)


if __name__ == "__main__":
    main()
