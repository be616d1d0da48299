"""The steps that jaxtrain brings along, and those of datatrove, by name."""

import ast
import functools
import ipaddress
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxtrain.data.formats.inputs import Text, extra
from jaxtrain.errors import UserError, nearest

Step = Callable[[Text], "Text | str"]
LICENCE = ("licence", "license", "licences", "licenses")  # where records tell it


def asks_for(*fields: str) -> Callable[[Step], Step]:
    """What a step wants to know of a record beside its text: it finds them in `document.record`, where they are."""

    def mark(step: Step) -> Step:
        vars(step)["fields"] = fields
        return step

    return mark


# ----------------------------------------------------------------------------------------------------------- quality

_LETTER = re.compile(r"[^\W\d_]")
_ENGLISH = {"the", "be", "to", "of", "and", "that", "have", "with"}


def quality(language: str = "en") -> Step:
    """The rules for documents and the rule for repeated lines of Gopher (Rae et al. 2021, arXiv:2112.11446, A.1.1).

    `quality=any` does without its English stop words.
    """
    if language not in ("en", "any"):
        raise UserError("--steps", f"quality={language} is not known", "use quality, or quality=any")

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

# Each begins with a set of characters, to which `re` can skip; what must not stand before it comes second.
_EMAIL = re.compile(r"[\w.+%-](?<![\w.+%-].)[\w.+%-]{0,63}@(?:[\w-]{1,63}\.)+[^\W\d_]{2,24}\b")
_IPV4 = re.compile(r"\d(?<![\w.]\d)\d{0,2}(?:\.\d{1,3}){3}(?!\w|\.\d)")
_IPV6 = re.compile(r"[23](?<![\w:].)[\da-fA-F]{3}(?::[\da-fA-F]{0,4}){2,7}(?![\w:])")  # of 2000::/3, all that is public
# With a country's code, or in the form of North America; what has neither is too like other numbers.
_PHONE = re.compile(r"[+(\d](?<![\w.+-].)"
                    r"(?:(?<=\+)[1-9]\d{0,2}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,4}){2,4}"
                    r"|(?<=\()\d{3}\) ?\d{3}[-.]\d{4}|(?<=\d)\d\d[-.]\d{3}[-.]\d{4})(?![\w-]|\.\d)")


def pii() -> Step:
    """Put e-mail, public IP addresses and phone numbers out of sight, behind ones that belong to nobody by standard."""

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
    """Keep documents in these languages (ISO 639-1), as py3langid tells from the thousand letters in the middle."""
    package, wanted = extra("py3langid.langid", "--steps language", "--steps", "governance"), _listed(codes)
    classify, known = package.classify, {code for code, _ in package.rank("a")}
    if unknown := sorted(wanted - known):
        raise UserError("--steps", f"language={unknown[0]} is no language that py3langid knows",
                        nearest(unknown[0], known))

    def step(document: Text) -> Text | str:
        text = document.content.decode()
        start = max(0, len(text) // 2 - 500)
        found = classify(text[start: start + 1000])[0]
        return document if found in wanted else f"is {found}"

    return step


def licence(names: str) -> Step:
    """Keep documents whose record tells its licence, and only such that are named here (SPDX)."""
    wanted = _listed(names)

    @asks_for(*LICENCE)
    def step(document: Text) -> Text | str:
        found = next((document.record[field] for field in LICENCE if document.record.get(field)), [])
        missing = [name for name in (found if isinstance(found, list) else [found]) if str(name).lower() not in wanted]
        return f"licence {missing[0]}" if missing else document if found else "no licence"

    return step


def blocklist(path: str) -> Step:
    """Leave out documents with a word or phrase of the file, one a line, and those from hosts named as `host:NAME`."""
    try:
        lines = [line.strip() for line in Path(path).expanduser().read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("--steps", f"the blocklist {path} cannot be read ({error})",
                        "name a file of text with a phrase a line") from error
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
    """A filter or formatter of datatrove: its class name, with keyword arguments as Python writes them."""
    name, keywords = _call(call)
    package = functools.partial(extra, what=f"--steps datatrove:{name}", key="--steps", group="governance")
    Document = package("datatrove.data").Document
    made: Any = None
    for module in ("filters", "formatters"):
        if kind := getattr(package(f"datatrove.pipeline.{module}"), name, None):
            made = kind(**keywords)
    if made is None or not (hasattr(made, "filter") or hasattr(made, "format")):
        raise UserError("--steps", f"datatrove has no filter or formatter {name!r}",
                        "name a class of datatrove.pipeline.filters or .formatters")

    @asks_for("url", "language")
    def step(document: Text) -> Text | str:
        trove = Document(document.content.decode(), document.name, metadata=dict(document.record))
        if hasattr(made, "format"):
            trove.text = made.format(trove.text)
        elif (verdict := made.filter(trove)) is not True:  # False, or False and why
            kept, reason = verdict if isinstance(verdict, tuple) else (verdict, "filtered")
            if not kept:
                return str(reason)
        content = trove.text.encode()  # a filter may cut lines, too
        return document if content == document.content else replace(document, content=content)

    return step


def _call(call: str) -> tuple[str, dict[str, Any]]:
    try:
        tree = ast.parse(call, mode="eval").body
        if isinstance(tree, ast.Name):
            return tree.id, {}
        assert isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.args
        return tree.func.id, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in tree.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise UserError("--steps", f"datatrove:{call} is not understood",
                        "write datatrove:CLASS or datatrove:CLASS(KEYWORD=VALUE), in quotes") from error


STEPS: dict[str, Callable[..., Step]] = {"quality": quality, "pii": pii, "language": language, "licence": licence,
                                         "blocklist": blocklist}
PACKAGES = {"language": "py3langid"}  # what decides about a step, beside the code here
