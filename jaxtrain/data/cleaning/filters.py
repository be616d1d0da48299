"""The built-in cleaning steps, and those of datatrove, by name."""

import ast
import functools
import ipaddress
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.formats.inputs import Text, extra
from jaxtrain.errors import UserError, nearest
from jaxtrain.files.bounded_files import read

Step = Callable[[Text], "Text | str"]
LICENCE = ("licence", "license", "licences", "licenses")  # fields of a record that may hold its licence


def asks_for(*fields: str) -> Callable[[Step], Step]:
    """Declare which other fields of a record a step needs; it finds those that exist in `document.record`."""

    def mark(step: Step) -> Step:
        vars(step)["fields"] = fields
        return step

    return mark


# ----------------------------------------------------------------------------------------------------------- quality

_LETTER = re.compile(r"[^\W\d_]")
_ENGLISH = {"the", "be", "to", "of", "and", "that", "have", "with"}


def quality(language: str = "en") -> Step:
    """Return a step with the document rules and the repeated-line rule of Gopher (arXiv 2112.11446, A.1.1).

    `quality=any` leaves out the rule for English stop words.
    """
    if language not in ("en", "any"):
        raise UserError("--filters", f"quality={language} is not known", "use quality, or quality=any")

    def step(document: Text) -> Text | str:
        text = document.content.decode()
        words, lines = text.split(), [line.strip() for line in text.splitlines() if line.strip()]
        if not 50 <= len(words) <= 100_000:
            return "fewer than 50 words" if len(words) < 50 else "more than 100,000 words"
        if not 3 <= sum(map(len, words)) / len(words) <= 10:
            return "words of unusual length"
        if max(text.count("#"), text.count("...") + text.count("…")) > 0.1 * len(words):
            return "many hashes or ellipses"
        if sum(line.startswith(("•", "-", "*")) for line in lines) > 0.9 * len(lines):
            return "nearly all lines are bullet points"
        if sum(line.endswith(("...", "…")) for line in lines) > 0.3 * len(lines):
            return "many lines end in an ellipsis"
        if sum(word.isalpha() or bool(_LETTER.search(word)) for word in words) < 0.8 * len(words):
            return "many words without a letter"
        if language == "en" and len(_ENGLISH.intersection(text.lower().split())) < 2:
            return "no English stop words"
        if len(lines) - len(set(lines)) > 0.3 * len(lines):
            return "many repeated lines"
        return document

    return step


# --------------------------------------------------------------------------------------------------------------- pii

# Each begins with a set of characters, so that `re` can skip ahead; the lookbehind comes second.
_EMAIL = re.compile(r"[\w.+%-](?<![\w.+%-].)[\w.+%-]{0,63}@(?:[\w-]{1,63}\.)+[^\W\d_]{2,24}\b")
_IPV4 = re.compile(r"\d(?<![\w.]\d)\d{0,2}(?:\.\d{1,3}){3}(?!\w|\.\d)")
_IPV6 = re.compile(r"[23](?<![\w:].)[\da-fA-F]{3}(?::[\da-fA-F]{0,4}){2,7}(?![\w:])")  # in 2000::/3, the public range
# With a country code or in the North American format; anything else looks too much like other numbers.
_PHONE = re.compile(r"[+(\d](?<![\w.+-].)"
                    r"(?:(?<=\+)[1-9]\d{0,2}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,4}){2,4}"
                    r"|(?<=\()\d{3}\) ?\d{3}[-.]\d{4}|(?<=\d)\d\d[-.]\d{3}[-.]\d{4})(?![\w-]|\.\d)")


def pii() -> Step:
    """Return a step that replaces e-mail addresses, public IP addresses and phone numbers by reserved ones."""

    def step(document: Text) -> Text | str:
        before = text = document.content.decode()
        if "@" in text:
            text = _EMAIL.sub("email@example.com", text)
        text = _PHONE.sub(_fictional, _IPV6.sub(_documented, _IPV4.sub(_documented, text)))
        return document if text == before else replace(document, content=text.encode())

    return step


def _documented(match: re.Match) -> str:
    try:
        ip = ipaddress.ip_address(match[0])
    except ValueError:
        return match[0]
    return ("192.0.2.1" if ip.version == 4 else "2001:db8::1") if ip.is_global else match[0]


def _fictional(match: re.Match) -> str:
    return "+1 202 555 0100" if 9 <= sum(map(str.isdigit, match[0])) <= 15 else match[0]


# ------------------------------------------------------------------------------------ language, licence, what is listed

def language(codes: str) -> Step:
    """Return a step that keeps documents in these languages (ISO 639-1).

    py3langid detects the language from the thousand characters in the middle.
    """
    package, wanted = extra("py3langid.langid", "--filters language", "--filters", "governance"), _listed(codes)
    classify, known = package.classify, {code for code, _ in package.rank("a")}
    if unknown := sorted(wanted - known):
        raise UserError("--filters", f"language={unknown[0]} is not a language that py3langid knows",
                        nearest(unknown[0], known))

    def step(document: Text) -> Text | str:
        text = document.content.decode()
        start = max(0, len(text) // 2 - 500)
        found = classify(text[start: start + 1000])[0]
        return document if found in wanted else f"is {found}"

    return step


def licence(names: str) -> Step:
    """Return a step that keeps only documents whose record names one of these licences (SPDX)."""
    wanted = _listed(names)

    @asks_for(*LICENCE)
    def step(document: Text) -> Text | str:
        found = next((document.record[field] for field in LICENCE if document.record.get(field)), [])
        missing = [name for name in (found if isinstance(found, list) else [found]) if str(name).lower() not in wanted]
        return f"licence {missing[0]}" if missing else document if found else "no licence"

    return step


def blocklist(path: str) -> Step:
    """Return a step that leaves out documents with a listed word or phrase, or from a listed host.

    The file has one word or phrase per line, and hosts as `host:NAME`.
    """
    try:
        lines = [line.strip() for line in read(Path(path).expanduser()).decode().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("--filters", f"the blocklist {path} cannot be read ({error})",
                        "name a file of text with one phrase per line") from error
    hosts = {line[5:].strip().lower() for line in lines if line.startswith("host:")}
    phrases = {" ".join(_words(line)) for line in lines if not line.startswith(("#", "host:"))} - {""}
    words, longer = {phrase for phrase in phrases if " " not in phrase}, [p.split() for p in phrases if " " in p]

    @asks_for(*(["url"] if hosts else []))
    def step(document: Text) -> Text | str:
        host = (urlsplit(str(document.record.get("url") or "")).hostname or "").split(".")
        if hosts and any(".".join(host[i:]) in hosts for i in range(len(host))):
            return "a listed host"
        inside = _words(document.content.decode())
        unique = set(inside)
        if not words.isdisjoint(unique):
            return "a listed word"
        here = [phrase for phrase in longer if unique.issuperset(phrase)]
        joined = f" {' '.join(inside)} " if here else ""
        return "a listed phrase" if any(f" {' '.join(phrase)} " in joined for phrase in here) else document

    return step


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _listed(names: str) -> set[str]:
    return {name.strip().lower() for name in names.split(",") if name.strip()}


# ------------------------------------------------------------------------------------------------------------ datatrove

def datatrove(call: str) -> Step:
    """Return a step from datatrove's filters or formatters: a class name, with keyword arguments as in Python."""
    name, keywords = _call(call)
    package = functools.partial(extra, what=f"--filters datatrove:{name}", key="--filters", group="governance")
    Document = package("datatrove.data").Document
    made: Any = None
    for module in ("filters", "formatters"):
        if kind := getattr(package(f"datatrove.pipeline.{module}"), name, None):
            made = kind(**keywords)
    if made is None or not (hasattr(made, "filter") or hasattr(made, "format")):
        raise UserError("--filters", f"datatrove has no filter or formatter {name!r}",
                        "name a class of datatrove.pipeline.filters or .formatters")

    @asks_for("url", "language")
    def step(document: Text) -> Text | str:
        trove = Document(document.content.decode(), document.name, metadata=dict(document.record))
        if hasattr(made, "format"):
            trove.text = made.format(trove.text)
        elif (verdict := made.filter(trove)) is not True:  # False, or False and the reason
            kept, reason = verdict if isinstance(verdict, tuple) else (verdict, "filtered")
            if not kept:
                return str(reason)
        content = trove.text.encode()  # a filter may also cut lines
        return document if content == document.content else replace(document, content=content)

    return step


def _call(call: str) -> tuple[str, JsonObject]:
    try:
        tree = ast.parse(call, mode="eval").body
        if isinstance(tree, ast.Name):
            return tree.id, {}
        assert isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.args
        return tree.func.id, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in tree.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise UserError("--filters", f"datatrove:{call} cannot be parsed",
                        "write datatrove:CLASS or datatrove:CLASS(KEYWORD=VALUE), in quotes") from error


STEPS: dict[str, Callable[..., Step]] = {"quality": quality, "pii": pii, "language": language, "licence": licence,
                                         "blocklist": blocklist}
PACKAGES = {"language": "py3langid"}  # packages that determine a step's result besides the code here
