"""Read rank files of tiktoken and Llama 3: on each line a token in base64 and its rank, and nothing else.

How text is split before merging, and which special tokens follow the ranks, is defined by a named scheme.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.data.tokenizers.vocabulary import MOST, Vocabulary, library, read_file, threads, told, uint32
from jaxtrain.errors import UserError, nearest


@dataclass(frozen=True)
class Scheme:
    """A pattern that splits text, and the ids of special tokens, counted from the last rank on."""

    pattern: str
    special: dict[str, int]


_WORD, _SPACE = r"[^\r\n\p{L}\p{N}]?", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = Scheme(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", {"<|endoftext|>": 0})
_LLAMA3 = rf"{_SHORT}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
_GPT4 = _LLAMA3.replace(_SPACE, rf"\s+$|{_SPACE}")  # space at a text's end stays together, line ends or not
_GPT4O = (rf"{_WORD}[{_UPPER}]*[{_LOWER}]+{_SHORT}?|{_WORD}[{_UPPER}]+[{_LOWER}]*{_SHORT}?|\p{{N}}{{1,3}}|"
          rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}")
SCHEMES = {
    "gpt2": _GPT2,
    "r50k_base": _GPT2,
    "cl100k_base": Scheme(_GPT4, {"<|endoftext|>": 1, "<|fim_prefix|>": 2, "<|fim_middle|>": 3, "<|fim_suffix|>": 4,
                                  "<|endofprompt|>": 20}),
    "o200k_base": Scheme(_GPT4O, {"<|endoftext|>": 1, "<|endofprompt|>": 20}),
    "llama3": Scheme(_LLAMA3, {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|start_header_id|>": 6,
                             "<|end_header_id|>": 7, "<|eot_id|>": 9, "<|reserved_special_token_247|>": 255}),
}
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s*")


def are_ranks(content: bytes) -> bool:
    """Return whether a file begins like a rank file."""
    return bool(_LINE.fullmatch(content[:1000].partition(b"\n")[0]))


class TiktokenTokenizer(Vocabulary):
    """A tokenizer from a rank file, run by the `tiktoken` library."""

    def __init__(self, path: Path, scheme: str = "", eod: str = "", bos: str = "", content: bytes | None = None):
        self.content = read_file(path) if content is None else content
        scheme = scheme or path.stem
        if scheme not in SCHEMES:
            raise UserError("data.tokenizer", f"{path} has no known scheme: {scheme!r}",
                            f"write {path}:SCHEME, {nearest(scheme, SCHEMES)}")
        ranks = _ranks(path, self.content)
        behind = 1 + max(ranks.values())
        if behind > MOST:
            raise UserError("data.tokenizer", f"{path} has ranks up to {behind - 1}", f"name a file below {MOST:,}")
        pattern, special = SCHEMES[scheme].pattern, SCHEMES[scheme].special
        self._special = {token: behind + place for token, place in special.items()}
        library_ = library("tiktoken", path)
        with told(path, "cannot be used as ranks"):
            self._encoding = library_.Encoding(scheme, pat_str=pattern, mergeable_ranks=ranks,
                                               special_tokens=self._special)
        self.name, self.file, self.vocab_size = path.name, f"{scheme}.tiktoken", self._encoding.max_token_value + 1
        self._lengths = np.zeros(self.vocab_size, np.int64)
        self._lengths[list(ranks.values())] = [len(token) for token in ranks]
        canonical = [pattern.encode(), *(b"%d %s" % (rank, token.hex().encode()) for token, rank in ranks.items())]
        self.settle(path, hashlib.sha256(b"\n".join(canonical)).hexdigest(), eod, bos)

    def id_of(self, token: str) -> int | None:
        """Return the id of a special token; all other tokens can result from text."""
        return self._special.get(token)

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Encode several documents, on all available threads, since the library releases Python's lock."""
        if threads() == 1 or len(texts) < 2:
            return [self._encode(text) for text in texts]
        with ThreadPoolExecutor(threads()) as pool:
            return list(pool.map(self._encode, texts))

    def _encode(self, text: bytes) -> np.ndarray:
        # Not encode_to_numpy: before 0.11 it always encoded special tokens in text.
        return uint32(self._encoding.encode_ordinary(text.decode(errors="replace")))

    def decode(self, ids: Iterable[int], specials: bool = False) -> str:
        """Return readable text; special tokens are dropped, or spelt out with `specials`."""
        spelt = set(self._special.values()) if specials else set()
        return self._encoding.decode([id for id in map(int, ids) if self._length(id) > 0 or id in spelt])

    def _length(self, id: int) -> int:
        return int(self._lengths[id]) if 0 <= id < self.vocab_size else 0

    def count_bytes(self, ids: np.ndarray) -> int:
        """Return the UTF-8 length of a document's text, from a table."""
        return int(self._lengths[ids].sum())


NAMED = SCHEMES.keys() - {"llama3"}  # those whose ranks the package tiktoken has


def named(name: str, eod: str, bos: str) -> TiktokenTokenizer:
    """Return a tokenizer from tiktoken's cache, or download it."""
    if name not in NAMED:
        raise UserError("data.tokenizer", f"there is no tiktoken:{name}", nearest(name, NAMED))
    get_encoding = library("tiktoken", f"tiktoken:{name}").get_encoding
    try:
        encoding = get_encoding(name)
    except (OSError, ValueError) as error:  # without a network tiktoken's client raises an OSError
        raise UserError("data.tokenizer", f"tiktoken cannot fetch {name} ({type(error).__name__})",
                        f"name a file of ranks: PATH:{name}") from error
    ranks = sorted((rank, token) for token, rank in encoding._mergeable_ranks.items())
    content = b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in ranks)
    return TiktokenTokenizer(Path(f"{name}.tiktoken"), name, eod, bos, content)


def _ranks(path: Path, content: bytes) -> dict[bytes, int]:
    """Parse a rank file into token -> rank, in order of rank."""
    ranks = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            if not rank.isdigit():  # int() takes signs and underscores too
                raise ValueError
            ranks[binascii.a2b_base64(token, strict_mode=True)] = int(rank)
        except ValueError as error:
            raise UserError("data.tokenizer", f"{path}, line {number} is not a base64 token with its rank",
                            "replace the file") from error
    bytes_ = sum(bytes([i]) in ranks for i in range(256))
    if bytes_ < 256 or len(set(ranks.values())) < len(ranks):
        raise UserError("data.tokenizer", f"{path} has {bytes_} of 256 bytes and {len(set(ranks.values()))} ranks for "
                        f"{len(ranks)} tokens", "every byte and token needs its own rank; replace the file")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))
