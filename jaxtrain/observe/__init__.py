"""Observability: metrics.jsonl, the progress line and trackers."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtrain.observe.flops import PEAK_BF16, device_peak, flops_per_token, mfu
    from jaxtrain.observe.metrics import Constants, MetricsWriter, Sink
    from jaxtrain.observe.progress import Progress

_HOME = {
    "PEAK_BF16": "flops", "device_peak": "flops", "flops_per_token": "flops", "mfu": "flops", "Constants": "metrics",
    "MetricsWriter": "metrics", "Sink": "metrics", "Progress": "progress",
}

__all__ = ["PEAK_BF16", "Constants", "MetricsWriter", "Progress", "Sink", "device_peak",
           "flops_per_token", "mfu"]


def __getattr__(name: str):  # imported on first use: the supervisor records events and does without JAX
    if name not in _HOME:
        raise AttributeError(f"module 'jaxtrain.observe' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"jaxtrain.observe.{_HOME[name]}"), name)
    return value
