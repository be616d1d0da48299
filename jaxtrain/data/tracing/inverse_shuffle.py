"""The inverse of the shuffles: at which place of an epoch a row is drawn, computed without looking at other rows.

Grain's permutation is a Feistel network over blocks of an even number of bits (functions of Simon, Beaulieu et al.,
https://eprint.iacr.org/2013/404), walked until it is back below the number of rows (Black and Rogaway 2002). Both are
undone step by step. The keys of the rounds are those of `std::seed_seq` (C++17, [rand.util.seedseq]).
"""

import math

import numpy as np

from jaxtrain.data.loading.bucketing import SMALL, Permutation
from jaxtrain.data.loading.shuffle import ROUNDS, Order, bound_of, permuted
from jaxtrain.errors import UserError

CHECKED = 8  # results of a call that Grain is asked to confirm


def places_of(order: Order, rows: np.ndarray, epochs: np.ndarray) -> np.ndarray:
    """Return at which place of the endless order each row is drawn in its epoch."""
    if not order.shuffled:
        return epochs * order.length + rows
    return epochs * order.length + inverse(rows, order.length, (order.seed + epochs) % 2**32)


def place_of(permutation: Permutation, epoch: int, number: int) -> int:
    """Return the place of a number in the permutation of an epoch."""
    if not permutation.shuffled:
        return number
    if permutation.count <= SMALL:
        return permutation.whole(epoch).index(number)
    return int(inverse(np.array([number]), permutation.count, np.array([permutation.seed(epoch)]))[0])


def inverse(numbers: np.ndarray, count: int, seeds: np.ndarray) -> np.ndarray:
    """Return at which place below `count` each of these numbers is in the permutation of its seed."""
    last = count - 1
    if not last:
        return np.zeros(len(numbers), np.int64)
    half = max(8, -(-math.ceil(math.log2(bound_of(last))) // 2))  # bits in each half of a block
    undone = _by_table if half == 8 and _table_is_faster(count, seeds) else _by_walking
    places = undone(numbers.astype(np.uint64), last, seeds, half).astype(np.int64)
    _confirm(numbers, places, last, seeds)
    return places


def _by_walking(values: np.ndarray, last: int, seeds: np.ndarray, half: int) -> np.ndarray:
    """Undo the network once for each number, and again where that leads above the last number."""
    keys, walking = round_keys(seeds), np.arange(len(values))
    while len(walking):
        values[walking] = _decrypted(values[walking], keys[:, walking], half)
        walking = walking[values[walking] > last]
    return values


def _by_table(values: np.ndarray, last: int, seeds: np.ndarray, half: int) -> np.ndarray:
    """Do the same with a table of all blocks for each seed: walks are as long as few of all numbers are in use."""
    blocks = np.arange(1 << 2 * half, dtype=np.uint64)
    for seed in np.unique(seeds):
        mine = np.flatnonzero(seeds == seed)
        back = _decrypted(blocks, round_keys(np.array([seed])), half)
        found, further = back[values[mine]], np.where(blocks <= last, blocks, back)
        while (found > last).any():  # each time twice as far
            found, further = further[found], further[further]
        values[mine] = found
    return values


def _table_is_faster(count: int, seeds: np.ndarray) -> bool:
    """Estimate whether a table for each seed takes less time than walking, by what both took on a CPU."""
    walk = 2**16 / count  # steps on average; the longest takes some times as many, each with NumPy's calls
    return 6e-3 * len(np.unique(seeds)) < walk * (5e-4 + 3e-7 * len(seeds))


def _decrypted(values: np.ndarray, keys: np.ndarray, half: int) -> np.ndarray:
    """Undo all rounds of the network."""
    width, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> width & mask, values & mask

    def turned(x: np.ndarray, by: int) -> np.ndarray:
        return (x << np.uint64(by) | x >> np.uint64(half - by)) & mask

    def mixed(x: np.ndarray) -> np.ndarray:
        return turned(x, 1) & turned(x, 8) ^ turned(x, 2)

    for first, second in zip(reversed(keys[::2]), reversed(keys[1::2]), strict=True):
        right ^= mixed(left) ^ second & mask
        left ^= mixed(right) ^ first & mask
    return left << width | right


def round_keys(seeds: np.ndarray) -> np.ndarray:
    """Return the 32-bit words that `std::seed_seq{seed}` generates for each of the rounds: [ROUNDS, seeds]."""
    n, k1, k2 = ROUNDS, np.uint32(1664525), np.uint32(1566083941)
    words = np.full((n, len(seeds)), 0x8B8B8B8B, np.uint32)
    given = seeds.astype(np.uint32)

    def stirred(x: np.ndarray, by: np.uint32) -> np.ndarray:
        return (x ^ x >> np.uint32(27)) * by

    for k in range(n):  # for so few words the standard's t and p are 1, its q is 2 and its m is n
        here, next_, after, before = (k + i for i in (0, 1, 2, n - 1))
        one = stirred(words[here] ^ words[next_ % n] ^ words[before % n], k1)
        two = one + (np.uint32(k) + (given if k == 1 else np.uint32(0)) if k else np.uint32(1))
        words[next_ % n] += one
        words[after % n] += two
        words[here] = two
    for k in range(n):
        next_, after, before = ((k + i) % n for i in (1, 2, n - 1))
        three = stirred(words[k] + words[next_] + words[before], k2)
        four = three - np.uint32(k)
        words[next_] ^= three
        words[after] ^= four
        words[k] = four
    return words.astype(np.uint64)


def _confirm(numbers: np.ndarray, places: np.ndarray, last: int, seeds: np.ndarray) -> None:
    """Raise an error if Grain's permutation is another one than is inverted here; it may change in a new version."""
    some = slice(None, None, max(1, len(places) // CHECKED))
    drawn = [permuted(place, last, seed) for place, seed in
             zip(places[some].tolist(), seeds[some].tolist(), strict=True)]
    if drawn != numbers[some].tolist():
        raise UserError("grain", "its shuffle is not the one that can be inverted", "install the version that "
                        "constraints.txt names")
