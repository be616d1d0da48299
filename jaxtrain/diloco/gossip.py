"""Gossip: in each round every island exchanges its progress and its outer parameters with one other only (NoLoCo).

The log is that of rounds in which all take part: an entry says who came. Who is paired with whom follows from the entry
alone, so nothing but the contents that an island fetches depends on the mode.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxtrain.diloco.meeting import Entry, Offer
from jaxtrain.errors import UserError


def pairs(entry: Entry) -> list[tuple[Offer, ...]]:
    """Return the contributions of an entry in random pairs, the same for everybody; an odd one is alone."""
    def drawn(offer: Offer) -> bytes:
        return hashlib.sha256(f"{entry.number} {offer.island}".encode()).digest()

    order = sorted(entry.contributions, key=drawn)
    return [tuple(sorted(order[at:at + 2])) for at in range(0, len(order), 2)]


def of(island: int, entry: Entry) -> Sequence[Offer]:
    """Return the contributions of an island's pair: two, one if it is alone, none if it is not in the entry."""
    return next((pair for pair in pairs(entry) if island in {offer.island for offer in pair}), ())


def packed(progress: bytes, slow: np.ndarray) -> bytes:
    """Return what an island offers: its progress as it is compressed, and its outer parameters in float32."""
    return progress + slow.astype("<f4").tobytes()


def unpacked(content: bytes, size: int) -> tuple[bytes, np.ndarray]:
    """Return the two parts of what an island offered, whose outer parameters have this size."""
    if len(content) < 4 * size:
        raise UserError("diloco.meeting", "another island sent parameters of another model", "begin anew, with a new "
                        "log and new workdirs, and equal configs of all islands")
    at = len(content) - 4 * size
    return content[:at], np.frombuffer(content, "<f4", offset=at)
