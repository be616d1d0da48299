"""Hide the credentials in URLs wherever text is shown, written or sent: a run's files, events, errors and messages.

Text from elsewhere, such as names in a published model's files, is also shown without what would steer a terminal.
"""

import re
import sys
import traceback
from typing import Any

HIDDEN = "***"
_PLAIN = {int, float, bool, type(None)}
_NAMED = ("abfs", "abfss", "wasb", "wasbs", "hdfs", "sftp", "ssh", "git+ssh")  # a name before @ is not a secret
_SCHEME = r"[a-zA-Z][a-zA-Z0-9+.-]*://"
_URL = re.compile(rf"\b({_SCHEME})((?:(?!{_SCHEME})\S)*)")
_SPACED = re.compile(rf"^{_SCHEME}[^\s/?#@:\[]*:(?!\d{{1,5}}(?:\W|$))[^@\n]*\s[^@\n]*@")
_VALUE = re.compile(r"([?&;#][^\s=&;#]+=)[^\s&;#]*?(?=[)\]}>'\",.:;]*(?:[&;#]|$))")

# Control characters, those that turn the direction of text, and half characters, which no encoding has.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """Return text with escapes such as \\x1b in place of all that steers a terminal, but for tabs and line feeds."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), f"{text}")


def redacted(value: object) -> Any:
    """Return text, or a structure of texts, with *** for the user and password of URLs and the values in their queries.

    A password may hold any character, but where it has unescaped spaces only a URL that begins the text is recognized.
    """
    if isinstance(value, dict):
        return {key: one if type(one) in _PLAIN else redacted(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(redacted, value))
    if not isinstance(value, str) or "://" not in value:
        return value
    return _URL.sub(_hide, _SPACED.sub(lambda url: f"{url[0].partition('://')[0]}://{HIDDEN}@", value))


def is_hidden(url: str) -> bool:
    """Return whether a URL lacks its credentials because it was read from where they are hidden."""
    return f"://{HIDDEN}@" in url or ("://" in url and f"={HIDDEN}" in url)


def hide_in_tracebacks() -> None:
    """Hide credentials in the traceback of an error that ends this process."""
    sys.excepthook = lambda _, error, __: print(printable(redacted("".join(traceback.format_exception(error)))), end="",
                                                file=sys.stderr)


def _hide(url: re.Match[str]) -> str:
    scheme, rest = url.groups()
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    user, at, _ = authority.rpartition("@")
    has_port = re.search(r":\d{1,5}$", authority) and not scheme.lower().startswith("s3")
    if not at and ":" in authority and "@" in rest and authority[0] != "[" and not has_port:
        user, at, _ = rest.rpartition("@")  # a password with a slash, as the keys of S3 have
    if at and (":" in user or scheme.lower()[:-3] not in _NAMED):
        rest = f"{HIDDEN}{rest[len(user):]}"
    return scheme + _VALUE.sub(rf"\1{HIDDEN}", rest)
