"""Transcripts as they are compared: the rules in appendix C of Radford et al., "Robust Speech Recognition via
Large-Scale Weak Supervision" (arXiv 2212.04356).

For any language: phrases in brackets, marks, symbols and punctuation are left out. For English besides: hesitations
too; contractions, titles, spelled-out numbers and amounts of money get one form, and British spellings that of a table,
such as the `normalizer.json` of a published model.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path

_LETTERS = {"œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "æ": "ae", "Æ": "AE", "ß": "ss", "ẞ": "SS", "đ": "d", "Đ": "D",
            "ð": "d", "Ð": "D", "þ": "th", "Þ": "th", "ł": "l", "Ł": "L"}  # those that do not decompose
_MONEY = {"dollar": "$", "cent": "¢", "euro": "€", "pound": "£"}

_PHRASES = re.compile(r"[<\[][^>\]]*[>\]]|\([^)]+?\)")
_HESITATIONS = re.compile(r"\b(?:hmm|mm|mhm|mmm|uh|um)\b")
_WORDS = {
    "won't": "will not", "can't": "can not", "let's": "let us", "ain't": "aint", "y'all": "you all",
    "wanna": "want to", "gotta": "got to", "gonna": "going to", "i'ma": "i am going to", "imma": "i am going to",
    "woulda": "would have", "coulda": "could have", "shoulda": "should have", "ma'am": "madam", "mr": "mister",
    "mrs": "missus", "st": "saint", "dr": "doctor", "prof": "professor", "capt": "captain", "gov": "governor",
    "ald": "alderman", "gen": "general", "sen": "senator", "rep": "representative", "pres": "president",
    "rev": "reverend", "hon": "honorable", "asst": "assistant", "assoc": "associate", "lt": "lieutenant",
    "col": "colonel", "jr": "junior", "sr": "senior", "esq": "esquire"}
_ENDS = (("'d been", " had been"), ("'s been", " has been"), ("'d gone", " had gone"), ("'s gone", " has gone"),
         ("'d done", " had done"), ("'s got", " has got"), ("n't", " not"), ("'re", " are"), ("'s", " is"),
         ("'d", " would"), ("'ll", " will"), ("'t", " not"), ("'ve", " have"), ("'m", " am"))
_WHOLE_WORDS = re.compile(rf"\b(?:{'|'.join(_WORDS)})\b")
_TITLES = {"mr", "mrs", "st", "dr", "prof", "capt", "gov", "ald", "gen", "sen", "rep", "pres", "rev", "hon",
           "asst", "assoc", "lt", "col", "jr", "sr", "esq"}  # titles stand in front of something


def basic(text: str, split_letters: bool = False, spaces: bool = True) -> str:
    """Return a transcript in any language in lower case, without phrases in brackets, marks and punctuation.

    `split_letters`: a space after each letter, for languages that are written without spaces between words.
    """
    text = _PHRASES.sub("", text.lower())
    text = "".join(" " if unicodedata.category(c)[0] in "MSP" else c for c in unicodedata.normalize("NFKC", text))
    if split_letters:
        text = " ".join(re.findall(r"\S", text.lower()))
    return re.sub(r"\s+", " ", text.lower())


def english(spellings: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Return the function that brings an English transcript into its one form; `spellings` replaces words."""
    table = spellings or {}

    def normalized(text: str) -> str:
        text = _HESITATIONS.sub("", _PHRASES.sub("", text.lower()))
        text = _expanded(re.sub(r"\s+'", "'", text))
        text = re.sub(r"(\d),(\d)", r"\1\2", text)
        text = re.sub(r"\.([^0-9]|$)", r" \1", text)
        text = with_digits(_plain(text, keep=".%$¢€£"))
        text = " ".join(table.get(word, word) for word in text.split())
        text = re.sub(r"[.$¢€£]([^0-9])", r" \1", text)
        return re.sub(r"\s+", " ", re.sub(r"([^0-9])%", r"\1 ", text))

    return normalized


def published_spellings(folder: str | Path) -> dict[str, str]:
    """Return the table of spellings in a published folder, {} where it has none."""
    path = Path(folder) / "normalizer.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _expanded(text: str) -> str:
    """Return a text without contractions and abbreviated titles."""
    def whole(match: re.Match[str]) -> str:
        word = match[0]
        return _WORDS[word] + " " * (word in _TITLES)

    text = _WHOLE_WORDS.sub(whole, text)
    for end, instead in _ENDS:
        text = re.sub(rf"{end}\b", instead, text)
    return text


def _plain(text: str, keep: str) -> str:
    """Return a text without diacritics, and with spaces for symbols but those to keep."""
    def one(c: str) -> str:
        if c in keep:
            return c
        kind = unicodedata.category(c)
        return _LETTERS.get(c, "" if kind == "Mn" else " " if kind[0] in "MSP" else c)

    return "".join(map(one, unicodedata.normalize("NFKD", text)))


# ------------------------------------------------------------------------------------------------------------- numbers

_ONES = {name: n for n, name in enumerate(
    ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"], 1)}
_ZEROS = {"o", "oh", "zero"}
_TENS = {name: 10 * n for n, name in enumerate(
    ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2)}
_POWERS = {"hundred": 100} | {name: 1000**n for n, name in enumerate(
    ["thousand", "million", "billion", "trillion", "quadrillion", "quintillion", "sextillion", "septillion",
    "octillion", "nonillion", "decillion"], 1)}
_ORDINALS = {"zeroth": (0, "th"), "first": (1, "st"), "second": (2, "nd"), "third": (3, "rd"), "fifth": (5, "th"),
             "twelfth": (12, "th")} | {
    name + ("h" if name.endswith("t") else "th"): (n, "th") for name, n in _ONES.items() if n > 3 and n not in (5, 12)}
_ORDINALS["ninth"] = _ORDINALS.pop("nineth")
_ONES_ENDED = _ORDINALS | {name + ("es" if name == "six" else "s"): (n, "s") for name, n in _ONES.items()}
_TENS_ENDED = {name[:-1] + end: (n, letters) for name, n in _TENS.items() for end, letters in (("ies", "s"),
                                                                                             ("ieth", "th"))}
_POWERS_ENDED = {name + end: (n, end) for name, n in _POWERS.items() for end in ("s", "th")}
_SIGNS = {"minus": "-", "negative": "-", "plus": "+", "positive": "+"}
_AFTER = {word + end: sign for word, sign in _MONEY.items() for end in ("", "s")}
_VALUED = {*_ONES, *_ZEROS, *_TENS, *_POWERS, *_ONES_ENDED, *_TENS_ENDED, *_POWERS_ENDED}
_SPECIAL = {"and", "double", "triple", "point"}


def with_digits(text: str) -> str:
    """Return a text with the numbers that it spells out, and amounts of money, in digits."""
    text = _halves(text)
    text = re.sub(r"([0-9])([a-z])", r"\1 \2", re.sub(r"([a-z])([0-9])", r"\1 \2", text))
    text = re.sub(r"([0-9])\s+(st|nd|rd|th|s)\b", r"\1\2", text)
    words = _Numbers().read(text.split())
    return _cents(" ".join(words))


def _halves(text: str) -> str:
    """Return a text in which "and a half" after a number is "point five"."""
    parts = re.split(r"\band\s+a\s+half\b", text)
    for n, part in enumerate(parts[:-1]):
        last = part.rsplit(maxsplit=1)
        counted = last and (last[-1] in _VALUED or re.fullmatch(r"[0-9.]+", last[-1]))
        parts[n] = f"{part} point five" if counted else f"{part} and a half"
    return " ".join(parts) if len(parts) > 1 else text


def _cents(text: str) -> str:
    """Return a text in which dollars and cents are one amount, and a lone 1 is a word."""
    text = re.sub(r"([€£$])([0-9]+) (?:and )?¢([0-9]{1,2})\b", lambda m: f"{m[1]}{m[2]}.{int(m[3]):02d}", text)
    text = re.sub(r"[€£$]0.([0-9]{1,2})\b", lambda m: f"¢{int(m[1])}", text)
    return re.sub(r"\b1(s?)\b", r"one\1", text)


class _Numbers:
    """Reads words in order, and puts numbers together: as a sum, or where that is none, digit by digit."""

    def __init__(self):
        self.found: list[str] = []
        self.value: int | str | None = None  # a string is read digit by digit, and may have a point
        self.sign = ""
        self.skip = False

    def read(self, words: list[str]) -> list[str]:
        for at, word in enumerate(words):
            if self.skip:
                self.skip = False
                continue
            self._word(words[at - 1] if at else None, word, words[at + 1] if at + 1 < len(words) else None)
        self._end()
        return self.found

    def _end(self, after: str = "") -> None:
        """Write the number that was read, if any, with what belongs after it."""
        if self.value is not None:
            self.found.append(f"{self.sign}{self.value}{after}")
        self.value, self.sign = None, ""

    def _plain(self, word: str) -> None:
        self._end()
        self.found.append(word)

    def _word(self, last: str | None, word: str, following: str | None) -> None:
        following_is_digits = following is not None and re.fullmatch(r"\d+(\.\d+)?", following) is not None
        signed = word[:1] in "$¢€£+-" and len(word) > 1
        bare = word[1:] if signed else word
        if re.fullmatch(r"\d+(\.\d+)?", bare):
            self._digits(bare, word[0] if signed else "", last)
        elif word in _ZEROS:
            self.value = f"{'' if self.value is None else self.value}0"
        elif word in _ONES or word in _ONES_ENDED:
            self._ones(*(_ONES_ENDED[word] if word in _ONES_ENDED else (_ONES[word], "")), last)
        elif word in _TENS or word in _TENS_ENDED:
            self._tens(*(_TENS_ENDED[word] if word in _TENS_ENDED else (_TENS[word], "")))
        elif word in _POWERS or word in _POWERS_ENDED:
            self._power(*(_POWERS_ENDED[word] if word in _POWERS_ENDED else (_POWERS[word], "")))
        elif word in _SIGNS:
            self._end()
            if following in _VALUED or following_is_digits:
                self.sign = _SIGNS[word]
            else:
                self._plain(word)
        elif word in _AFTER:
            if self.value is not None:
                self.sign = _AFTER[word]
                self._end()
            else:
                self._plain(word)
        elif word in ("percent", "per") and (word == "percent" or following == "cent"):
            if self.value is not None:
                self._end("%")
                self.skip = word == "per"
            else:
                self._plain(word)
        elif word in _SPECIAL and (following in _VALUED or following_is_digits):
            self._special(word, last, following, following_is_digits)
        else:
            self._plain(word)

    def _digits(self, digits: str, sign: str, last: str | None) -> None:
        if isinstance(self.value, str) and self.value.endswith(".") and not sign:
            self.value += digits  # decimals after a point
            return
        self._end()
        self.sign = sign or self.sign
        self.value = int(digits) if "." not in digits else digits

    def _ones(self, n: int, end: str, last: str | None) -> None:
        value = self.value
        if value is None:
            self.value = n
        elif isinstance(value, str) or last in _ONES:
            by_ten = last in _TENS and n < 10
            self.value = f"{value}"[:-1] + f"{n}" if by_ten else f"{value}{n}"
        elif value % (10 if n < 10 else 100) == 0:
            self.value = value + n
        else:
            self.value = f"{value}{n}"
        if end:
            self._end(end)

    def _tens(self, n: int, end: str) -> None:
        if self.value is None:
            self.value = n
        elif not isinstance(self.value, str) and self.value % 100 == 0:
            self.value += n
        else:
            self.value = f"{self.value}{n}"
        if end:
            self._end(end)

    def _power(self, n: int, end: str) -> None:
        value = self.value
        if value is None:
            self.value = n
        elif isinstance(value, str) or value == 0:
            product = Fraction(value.rstrip(".") if isinstance(value, str) else value) * n
            if product.denominator == 1:
                self.value = int(product)
            else:
                self._end()
                self.value = n
        else:
            self.value = value // 1000 * 1000 + value % 1000 * n
        if end:
            self._end(end)

    def _special(self, word: str, last: str | None, following: str | None, digits: bool) -> None:
        if word == "and":
            if last not in _POWERS:
                self._plain(word)
        elif word == "point":
            if last in _VALUED or (last is not None and re.fullmatch(r"[\d.]+", last)):
                self.value = f"{'' if self.value is None else self.value}."
            else:
                self._plain(word)
        elif following in _ONES or following in _ZEROS:
            times, n = 2 if word == "double" else 3, _ONES.get(following or "", 0)
            self.value = f"{'' if self.value is None else self.value}{f'{n}' * times}"
            self.skip = True
        else:
            self._plain(word)
