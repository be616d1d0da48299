"""A stretch of tokens that is traced, and a span of a row that has some of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stretch:
    """Tokens `start` to `stop` of the training split of a source ("": the only one), within one document."""

    source: str
    start: int
    stop: int


@dataclass(frozen=True)
class Span:
    """Positions `begin` to `end` of a row, whose inputs are the tokens from `token` on, and whose targets follow."""

    row: int
    begin: int
    end: int
    token: int
