"""The number of the layer that is being traced: in its stack, and among all layers of the model."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax

_NUMBER: ContextVar[Any] = ContextVar("number", default=0)
_FIRST: ContextVar[Any] = ContextVar("first", default=0)
_READ: ContextVar[bool] = ContextVar("read", default=False)


@contextlib.contextmanager
def in_stack(number: jax.Array | int, first: jax.Array | int) -> Iterator[None]:
    """A context in which this entry of a stack is computed; `first` is the number of its first layer among all."""
    tokens = _NUMBER.set(number), _FIRST.set(first)
    try:
        yield
    finally:
        _NUMBER.reset(tokens[0])
        _FIRST.reset(tokens[1])


@contextlib.contextmanager
def in_group(position: int) -> Iterator[None]:
    """A context in which the layer at this position of a group is computed, which is one entry of a stack."""
    token = _FIRST.set(_FIRST.get() + position)
    try:
        yield
    finally:
        _FIRST.reset(token)


@contextlib.contextmanager
def read() -> Iterator[None]:
    """A context in which layers are numbered, though none of them asks for it, since something reads it here."""
    token = _READ.set(True)
    try:
        yield
    finally:
        _READ.reset(token)


def is_read() -> bool:
    """Return whether layers that are traced now have to be numbered."""
    return _READ.get()


def number() -> jax.Array | int:
    """Return the number of the entry, in its stack, that is computed now."""
    return _NUMBER.get()


def number_of_all() -> jax.Array | int:
    """Return the number of the layer, among all of the model, that is computed now."""
    return _FIRST.get()
