"""Length bucketing: batches of documents or sequences of similar length, each padded to the length of its bucket.

Which rows a batch holds is a pure function of (lengths, options, step). In each epoch the rows of a bucket are
permuted and cut into batches, and the batches of all buckets are permuted. Rows left over in a bucket move up to the
next larger one (different rows in each epoch), so that every row comes exactly once an epoch; the last batch of the
largest bucket is filled with rows of weight 0.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

from jaxtrain.config.schema import DataConfig
from jaxtrain.data.loading.readahead import ReadAhead
from jaxtrain.data.loading.shuffle import permuted
from jaxtrain.data.packing.document_rows import Unpacked
from jaxtrain.errors import UserError

MULTIPLE = 64  # divides the lengths of automatic buckets if rows are long, so that most meshes split them evenly
CANDIDATES = 1024  # lengths considered for buckets; more would take longer for a tenth of a percent less padding
# Up to this many entries a permutation is made at once, by NumPy's frozen generator. Grain's gives any entry alone
# but takes 17 ms / count for each (2 ms if there are ten, 4 us if there are 4096).
SMALL = 4096


def choose(lengths: np.ndarray, count: int, multiple: int = 1) -> tuple[int, ...]:
    """Choose at most `count` bucket lengths, multiples of `multiple`, that need the least padding for these rows.

    V: lengths that occur, in rising order.
    """
    values_V, counts_V = np.unique(np.maximum(-(-lengths // multiple), 1) * multiple, return_counts=True)
    if not len(values_V):
        raise UserError("buckets", "there are no rows to choose lengths for", "give more data")
    ends_V, steps_V = np.cumsum(counts_V), np.cumsum(counts_V * values_V)
    if len(values_V) > CANDIDATES:
        kept = np.unique(np.searchsorted(steps_V, np.linspace(0, steps_V[-1], CANDIDATES + 1)[1:]))
        values_V, ends_V = values_V[kept], ends_V[kept]
    before_V = np.concatenate([[0], ends_V[:-1]])
    # places_VV[i, j]: the places that the rows of lengths i to j take in a bucket of length j
    places_VV = np.where(np.arange(len(values_V))[:, None] <= np.arange(len(values_V)),
                         (ends_V - before_V[:, None]) * values_V, np.iinfo(np.int64).max // 2)
    least_V, froms = places_VV[0], []
    for _ in range(min(count, len(values_V)) - 1):
        through_VV = np.concatenate([[0], least_V[:-1]])[:, None] + places_VV
        froms.append(through_VV.argmin(0))
        least_V = through_VV.min(0)
    chosen, at = [], len(values_V) - 1
    for from_V in reversed(froms):
        chosen.append(int(values_V[at]))
        at = int(from_V[at]) - 1
        if at < 0:
            return tuple(reversed(chosen))
    return tuple(reversed([*chosen, int(values_V[at])]))


def bucket_lengths(config: DataConfig, lengths: np.ndarray, unit: str) -> tuple[int, ...]:
    """Return the lengths of rows that `data.buckets` says for rows of these lengths, or the eight that pad least."""
    if not config.buckets:
        chosen = choose(lengths, 8, MULTIPLE if config.seq_len >= 8 * MULTIPLE else 8)
        return tuple(dict.fromkeys(min(length, config.seq_len) for length in chosen))
    if lengths.max() > max(config.buckets):
        raise UserError("data.buckets", f"the longest is {max(config.buckets)} and rows have up to {lengths.max()} "
                        f"{unit}", f"add a bucket of data.seq_len {unit}")
    return tuple(config.buckets)


def padding(lengths: np.ndarray, buckets: Sequence[int]) -> float:
    """Return the share of padding if all batches are full."""
    places = np.asarray(buckets)[np.searchsorted(buckets, lengths)].sum()
    return float(1 - lengths.sum() / places)


def equal_sizes(buckets: Sequence[int], places: int, multiple: int = 1) -> list[int]:
    """Return a number of rows per bucket, multiples of `multiple`, so that all batches have about as many `places`."""
    return [max(1, places // (length * multiple)) * multiple for length in buckets]


class BucketedBatches:
    """Bucketed batches by step: `batches[step]` is a dict of [size(step), ...] arrays of rows of length(step).

    `global_batch_size` is one number of rows for all buckets, or one for each. With `repeat` epochs of
    `batches_per_epoch` batches follow without end, otherwise there is only one. Buckets without rows are dropped. For
    `threads` see loader.Batches.
    """

    def __init__(self, rows: Unpacked, *, buckets: Sequence[int], global_batch_size: int | Sequence[int], seed: int,
                 shuffle: bool = True, repeat: bool = True, threads: int = 0):
        given = [global_batch_size] * len(buckets) if isinstance(global_batch_size, int) else list(global_batch_size)
        _check(rows.lengths, buckets, given, seed)
        bucket_of = np.searchsorted(buckets, rows.lengths).astype(np.uint8)
        used = np.flatnonzero(np.bincount(bucket_of, minlength=len(buckets))).tolist()
        self.all_rows = rows
        self._lengths, self.sizes = [int(buckets[b]) for b in used], [int(given[b]) for b in used]
        self.members = [np.flatnonzero(bucket_of == b) for b in used]
        there, full = [], []  # rows of each bucket, including those moved up; its number of batches
        for b, (members, size) in enumerate(zip(self.members, self.sizes, strict=True)):
            there.append(len(members) + (there[-1] - full[-1] * self.sizes[b - 1] if b else 0))
            full.append(there[b] // size)
        full[-1] = -(-there[-1] // self.sizes[-1])
        self.there, self.full, self.ends = there, full, np.cumsum(full).tolist()
        self.order = [Permutation(count, seed, b, shuffle) for b, count in enumerate(there)]
        self.batches_per_epoch = self.ends[-1]
        self.turns = Permutation(self.batches_per_epoch, seed, len(there), shuffle)
        self.num_batches = None if repeat else self.batches_per_epoch  # None: no end
        self.global_batch_size = max(self.sizes)
        self._counted = 0, 0  # a step, and the tokens before it
        self._ahead = ReadAhead(self._read, threads) if threads else None

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return self.rows(step, range(self.size(step)))

    def length(self, step: int) -> int:
        """Return the length of the rows at `step`."""
        return self._lengths[self._place(step)[0]]

    def size(self, step: int) -> int:
        """Return the number of rows in the global batch at `step`."""
        return self.sizes[self._place(step)[0]]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The (size, length) that batches may have, shortest first; each is compiled once."""
        of_buckets = zip(self.sizes, self._lengths, self.full, strict=True)
        return [(size, length) for size, length, full in of_buckets if full]

    def shape(self, step: int) -> tuple[int, int]:
        """Return the number of rows, and of tokens per row, at this step."""
        bucket = self._place(step)[0]
        return self.sizes[bucket], self._lengths[bucket]

    def tokens(self, step: int) -> int:
        """Return the number of places in all batches before this step, with padding; fast if called step after step."""
        in_epoch = step % self.batches_per_epoch
        per_epoch = sum(size * length * full for size, length, full in
                        zip(self.sizes, self._lengths, self.full, strict=True))
        last, counted = self._counted
        first = step - in_epoch
        if not first <= last <= step:
            last, counted = first, first // self.batches_per_epoch * per_epoch
        counted += sum(math.prod(self.shape(before)) for before in range(last, step))
        self._counted = step, counted
        return counted

    def epochs(self, step: int) -> dict[str, float]:
        """Return the number of epochs over all rows before this step."""
        return {"": step / self.batches_per_epoch}

    def origin(self, step: int, index: int) -> tuple[str, Unpacked, int | None]:
        """Return a row's source ("": the only one), that source's rows, and its number there; None: an empty row."""
        return "", self.all_rows, self.numbers(step, [index])[0]

    def shapes_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the shapes that the batches of steps `start` to `stop` may have."""
        return self.shapes if start < stop else []

    def rows(self, step: int, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return only these rows of the global batch at `step`: those that one process needs."""
        return self._ahead.rows(step, indices) if self._ahead else self._read(step, indices)

    def _read(self, step: int, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        length, numbers = self.length(step), self.numbers(step, indices)
        chosen = [self._empty(step, length) if i is None else self.all_rows.row(i, length) for i in numbers]
        return {name: np.stack([row[name] for row in chosen]) for name in chosen[0]}

    def numbers(self, step: int, indices: Sequence[int] | np.ndarray) -> list[int | None]:
        """Return the numbers of these rows in the data; None for a row that only fills up the batch."""
        bucket, batch, epoch = self._place(step)
        size = self.sizes[bucket]
        found = []
        for index in indices:
            if not 0 <= index < size:
                raise IndexError(f"row {index} of a batch of {size}")
            place = batch * size + int(index)
            found.append(self._number(bucket, place, epoch) if place < self.there[bucket] else None)
        return found

    def _empty(self, step: int, length: int) -> dict[str, np.ndarray]:
        first, = self.numbers(step, [0])
        assert first is not None  # no batch is empty
        return {name: np.zeros_like(column) for name, column in self.all_rows.row(first, length).items()}

    def _place(self, step: int) -> tuple[int, int, int]:
        """Return the bucket, the batch within it, and the epoch of a step."""
        if step < 0 or (self.num_batches is not None and step >= self.num_batches):
            raise IndexError(f"batch {step} of {self.num_batches}")
        epoch = int(step) // self.batches_per_epoch
        turn = self.turns(epoch, int(step) % self.batches_per_epoch)
        bucket = int(np.searchsorted(self.ends, turn, "right"))
        return bucket, turn - self.ends[bucket] + self.full[bucket], epoch

    def _number(self, bucket: int, place: int, epoch: int) -> int:
        """Return the row at a place of a bucket in this epoch; rows that moved up are looked up in smaller buckets."""
        while True:
            at, own = self.order[bucket](epoch, place), self.members[bucket]
            if at < len(own):
                return int(own[at])
            bucket -= 1
            place = self.full[bucket] * self.sizes[bucket] + at - len(own)


class Permutation:
    """A new permutation of the numbers below `count` each epoch, of which any entry is computed in O(1)."""

    def __init__(self, count: int, seed: int, which: int, shuffle: bool):
        self.count, self.shuffled = count, shuffle
        self._first = int(np.random.SeedSequence([seed, which]).generate_state(1)[0])
        self.whole = functools.lru_cache(maxsize=2)(self._whole)

    def __call__(self, epoch: int, place: int) -> int:
        """Return the number at a place of an epoch."""
        if not self.shuffled:
            return place
        if self.count <= SMALL:
            return self.whole(epoch)[place]
        return permuted(place, self.count - 1, self.seed(epoch))

    def seed(self, epoch: int) -> int:
        """Return the seed of an epoch's permutation."""
        return (self._first + epoch) % 2**32

    def _whole(self, epoch: int) -> list[int]:
        return np.random.RandomState(self.seed(epoch)).permutation(self.count).tolist()


def _check(lengths: np.ndarray, buckets: Sequence[int], sizes: Sequence[int], seed: int) -> None:
    if seed < 0:
        raise UserError("data.seed", f"{seed} is negative", "use 0 or more")
    if not len(lengths):
        raise UserError("data.source", "it has no rows", "give more data")
    if not 0 < len(buckets) <= 255 or any(np.diff(buckets) < 1) or buckets[0] < 1:
        raise UserError("buckets", f"{list(buckets)} are not in rising order", "give 1 to 255 of them, shortest first")
    if len(sizes) != len(buckets) or min(sizes) < 1:
        raise UserError("global_batch_size", f"{list(sizes)} do not fit {len(buckets)} buckets",
                        "give one number of rows, or one for each bucket")
    if lengths.max() > buckets[-1]:
        raise UserError("buckets", f"the longest is {buckets[-1]} and a row has {lengths.max()}",
                        "add a bucket for it, or truncate longer sequences")
