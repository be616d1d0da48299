"""The steps after which saves are due, by the interval between them."""


def last_due(done: int, every: int) -> int:
    """Return the last step, up to this one, after which something is due that comes every so many steps; 0: none."""
    return done // every * every if every else 0


def is_due(done: int, every: int) -> bool:
    """Return whether something that comes every so many steps (0: never) is due after this step."""
    return bool(every) and last_due(done, every) == done
