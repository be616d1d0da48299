"""Offers and entries as JSON, checked when they are read: from a journal, a network, a store or a file."""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Container
from dataclasses import asdict
from pathlib import Path

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.diloco.meeting import Entry, Offer
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import misfit, parsed

_OFFER = {"island": int, "base": int, "fragment": int, "weight": int | float, "sha256": str, "steps?": int,
          "tokens?": int, "last?": bool, "same?": str}
_KEPT = {"step": int, "offer": dict, "size": int, "sha256": str}  # the first line of a file with an offer
_LINE = 2**16  # bytes of that line at most
_ENTRY = {"number": int, "fragment": int, "contributions": [_OFFER], "refused": [_OFFER]}


def offer_of(value: Json) -> Offer:
    """Return the offer that a JSON value holds; raises ValueError if it holds none."""
    if wrong := misfit(value, _OFFER):
        raise ValueError(f"is not an offer: {wrong}")
    offer = Offer(**{name.removesuffix("?"): value[name.removesuffix("?")] for name in _OFFER
                     if name.removesuffix("?") in value})
    counts = offer.island, offer.base, offer.fragment, offer.steps, offer.tokens
    hashes = offer.sha256, offer.same or offer.sha256
    if min(counts) < 0 or max(counts) >= 2**53 or not 0 <= offer.weight < math.inf or not all(map(is_hash, hashes)):
        raise ValueError("is not an offer: a number or the hash is out of range")
    return offer


def entry_of(value: Json) -> Entry:
    """Return the entry that a JSON value holds; raises ValueError if it holds none."""
    if wrong := misfit(value, _ENTRY):
        raise ValueError(f"is not an entry: {wrong}")
    return Entry(value["number"], value["fragment"], tuple(map(offer_of, value["contributions"])),
                 tuple(map(offer_of, value["refused"])))


def as_json(entry: Entry) -> JsonObject:
    """Return an entry as `entry_of` takes it."""
    return {"number": entry.number, "fragment": entry.fragment,
            "contributions": [asdict(offer) for offer in entry.contributions],
            "refused": [asdict(offer) for offer in entry.refused]}


def write_offer(path: Path, step: int, offer: Offer, content: bytes, unsent: bytes = b"") -> None:
    """Write an offer, its content and what that lacks to a file, for the checkpoint of this step."""
    head = {"step": step, "offer": asdict(offer), "size": len(content),
            "sha256": hashlib.sha256(content + unsent).hexdigest()}
    with atomic_files.written(path, shared=False) as file:
        file.write(json.dumps(head).encode() + b"\n" + content + unsent)


def read_offer(path: Path, island: int, base: int) -> tuple[Offer, bytes, bytes] | None:
    """Return the offer of this island and base, its content and what that lacks, if the file has these, whole."""
    with contextlib.suppress(OSError, ValueError):
        line, _, rest = path.read_bytes().partition(b"\n")
        head = parsed(line, _KEPT)
        offer = offer_of(head["offer"])
        if (offer.island, offer.base, head["sha256"]) == (island, base, hashlib.sha256(rest).hexdigest()):
            return offer, rest[:head["size"]], rest[head["size"]:]
    return None


def remove_offer(path: Path, position: int, steps: Container[int]) -> None:
    """Remove such a file once its offer is settled by an entry up to `position`, but not while one of `steps` needs it.

    `steps`: those whose checkpoints are there, from which the run may yet begin again.
    """
    with contextlib.suppress(OSError, ValueError):
        with path.open("rb") as file:
            head = parsed(file.readline(_LINE), _KEPT)
        if offer_of(head["offer"]).round <= position and head["step"] not in steps:
            path.unlink()


def is_hash(text: object) -> bool:
    """Return whether this is a sha256 in hexadecimal digits; it names a file, so nothing else will do."""
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{64}", text) is not None
