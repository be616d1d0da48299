"""Refuse a tokenizer.json with which text would grow beyond what fits into memory, or that has no tokens for text."""

import base64
import binascii
import re
import string
from collections.abc import Iterator, Mapping

from jaxtrain.base.annotations import Json, JsonMapping

MOST_TIMES = 256  # how much longer a normalizer or decoder may make a text; published ones: 33 times at most
MOST_ADDED = 2**16  # characters that may be added to each text
LONGEST = 2**16  # characters of a token
_MAYBE_EMPTY = re.compile(r"[*?|^$]|\\[bBAzZG]|\{0?,|\{0")  # in a regular expression that may match nothing


def check(described: JsonMapping) -> None:
    """Raise ValueError where a normalizer or a decoder makes much longer texts, or a token is very long."""
    for part in ("normalizer", "decoder"):
        times, added = 1, 0
        for step in _steps(described.get(part)):
            more, new = _growth(step)
            times, added = times * more, added * more + new
            if times > MOST_TIMES or added > MOST_ADDED:
                raise ValueError(f"its {part} makes a text more than {MOST_TIMES} times as long, or {MOST_ADDED:,} "
                                 "characters longer")
    model = described.get("model") or {}
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        _check_token(model.get(name))
    vocab = model.get("vocab") or ()
    for token in vocab:  # or a pair of a token and its score
        _check_token(token[0] if isinstance(token, list) and token else token)
    for token in described.get("added_tokens") or ():
        _check_token(token["content"])


def _check_token(token: Json) -> None:
    if isinstance(token, str) and len(token) > LONGEST:
        raise ValueError(f"it has a token of {len(token):,} characters, and {LONGEST:,} are the most")


def _steps(part: Json) -> Iterator[JsonMapping]:
    """Yield the steps of a part of a tokenizer.json in order, without the sequences that they are in."""
    if isinstance(part, dict):
        inside = [part[name] for name in ("normalizers", "decoders") if isinstance(part.get(name), list)]
        if not inside:
            yield part
        for step in (step for several in inside for step in several):
            yield from _steps(step)


def _growth(step: JsonMapping) -> tuple[int, int]:
    """Return how many times as long a step makes a text at most, and how many characters it adds besides."""
    kind = step.get("type")
    if kind == "Prepend":
        return 1, len(f"{step.get('prepend')}")
    if kind == "Precompiled":
        return max(1, _longest_in(step.get("precompiled_charsmap"))), 0
    if kind != "Replace":
        return 1, 0
    size, pattern = len(f"{step.get('content')}"), step.get("pattern")
    found = pattern.get("Regex", pattern.get("String")) if isinstance(pattern, dict) else pattern
    found = found if isinstance(found, str) else ""
    if isinstance(pattern, dict) and "String" in pattern and found:
        return max(1, -(-size // len(found))), 0
    empty = not found or _MAYBE_EMPTY.search(found)
    return (1 + size, size) if empty and size else (max(1, size), 0)


def _longest_in(charsmap: Json) -> int:
    """Return the most bytes that a character becomes by SentencePiece's compiled map, which ends with all of them."""
    try:
        content = base64.b64decode(charsmap or "")
    except (TypeError, ValueError, binascii.Error):
        return 1  # which the library refuses
    trie = int.from_bytes(content[:4], "little")
    return max(map(len, content[4 + trie:].split(b"\0")), default=1)


def silent(described: JsonMapping, raw: Json) -> str:
    """Return what a tokenizer leaves out of texts, as a sentence; raises ValueError if it has no tokens for text.

    `raw`: the tokenizer, made from what is `described`.
    """
    unknown = (described.get("model") or {}).get("unk_token")
    unknown = raw.token_to_id(unknown) if isinstance(unknown, str) else (described.get("model") or {}).get("unk_id")
    special = {token["content"] for token in described.get("added_tokens") or () if token["special"]}
    own = [token for token in _first(raw.get_vocab(with_added_tokens=False), 100) if token not in special]

    def said(text: str) -> set[int | None]:  # one by one: threads would stay, and a fork could not follow
        try:
            return {*raw.encode(text, add_special_tokens=False).ids}
        except Exception:  # a vocabulary of words without an unknown one refuses others, and leaves nothing out
            return {unknown}

    common = {text: said(text) for text in string.ascii_letters + string.digits}
    if not any(ids - {unknown} for ids in (*common.values(), *map(said, [*string.punctuation, *own]))):
        raise ValueError("it has no token for any text")
    lost = [text for text, ids in common.items() if not ids]
    return "" if 2 * len(lost) < len(common) else (
        f"it has no tokens for {len(lost)} of {len(common)} letters and digits, such as {lost[0]!r}, and leaves these "
        "out of all texts")


def _first(tokens: Mapping[str, int], count: int) -> list[str]:
    return [token for token, _ in zip(tokens, range(count), strict=False)]
