"""The form in which commands print what scripts read: JSON objects, one a line."""

import json
import math
from collections.abc import Mapping

from jaxtrain.errors import tell


def tell_json(*objects: object) -> None:
    """Print each object as a line of JSON: numbers in full precision, null if not finite; what has no form is text."""
    for one in objects:
        tell(json.dumps(_finite(one), default=str, allow_nan=False), flush=True)


def _finite(value: object) -> object:
    """Return a value with null in place of numbers that JSON does not have, as metrics.jsonl has it."""
    if isinstance(value, Mapping):
        return {f"{key}": _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
