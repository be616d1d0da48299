"""Names, for signatures, of values that no class describes."""

from collections.abc import Mapping
from typing import Any

Json = Any  # what JSON text holds: an object, a list, text, a number, a bool, or None
JsonObject = dict[str, Any]  # an object of JSON: a record, a manifest, the keys of a config
JsonMapping = Mapping[str, Any]  # an object of JSON that is only read
AnyArray = Any  # an array of NumPy's or JAX's, or an abstract one: whatever has a shape and a dtype
PyTree = Any  # nested containers, as jax.tree takes them, of what the argument's name says
