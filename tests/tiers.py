"""Cases of a parametrized test that belong to a tier of their own (docs/testing.md)."""

from typing import Any

import pytest


def slow(*cases: Any) -> list:
    """Return the cases, each a tuple of arguments or a single one, for `-m slow`."""
    return [_marked(case, pytest.mark.slow) for case in cases]


def exhaustive(*cases: Any) -> list:
    """Return the cases, each a tuple of arguments or a single one, for `-m exhaustive`."""
    return [_marked(case, pytest.mark.exhaustive) for case in cases]


def slow_if(chosen: bool) -> pytest.MarkDecorator:
    """Return the mark of a case that is slow where it is chosen, and exhaustive elsewhere."""
    return pytest.mark.slow if chosen else pytest.mark.exhaustive


def _marked(case, mark):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
