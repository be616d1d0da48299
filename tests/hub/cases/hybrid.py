"""Decoders with states in place of attention in some or all layers."""

from typing import Any

CASES: dict[str, tuple[str, dict[str, Any]]] = {}  # name: (model type, what transformers is given)
