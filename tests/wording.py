"""Phrases that readers could not understand, or for which the field has another word."""

import re

UNCLEAR = re.compile(r"""
    \b(?:nats|bits)\ a\ byte | \b(?:tokens|rows|bytes|gigabits|steps|samples)\ a\ (?:second|step)\b  # per
    | \bso\ many\b | \b(?:that|those)\ of\ *(?:\||\Z) | \blikewise\ *[,;|.]
    | \bgo(?:es)?\ on\ (?:from|with|behind)\b  # resume, continue
    | \bof\ one's\ own\b | \bas\ the\ job's\ key\b
    """, re.VERBOSE)


def unclear(text: str) -> list[str]:
    """Return the lines of a text that have such a phrase."""
    return [line.strip() for line in text.splitlines() if UNCLEAR.search(line)]
