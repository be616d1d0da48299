"""A separate process for work that needs the user's config file or devices, and releases the devices when it ends."""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.config.load import make_config, read_config
from jaxtrain.errors import UserError, nearest
from jaxtrain.launch.sweep.sweep_file import Sweep

_USUAL = ("loss", "cross_entropy", "perplexity", "grad_norm", "eval_loss", "eval_perplexity", "eval_bits_per_byte",
          "eval_loss_ema")  # of most runs


def values_of(config: str) -> JsonObject:
    """Return what a config says, before defaults and checks."""
    return _apart(read_config, config)


def check_metric(sweep: Sweep) -> None:
    """Refuse a metric that the runs of a sweep do not have."""
    if sweep.metric not in _USUAL:
        known = _apart(metrics_of, sweep.values, sweep.overrides(sweep.example(), None))
        if sweep.metric not in known:
            raise UserError("objective.metric", f"runs have no {sweep.metric!r}", nearest(sweep.metric, known))


def metrics_of(values: JsonMapping, overrides: JsonMapping) -> list[str]:
    """Return the metrics of a run, of its steps and of its evaluations; one device is enough to tell."""
    import jax

    from jaxtrain.builder import build
    from jaxtrain.run import shapes_of

    overrides = {key: value for key, value in overrides.items() if not key.startswith("mesh.")}
    run = build(make_config({**values, "mesh": {}}, overrides), devices=jax.devices()[:1])
    own = [f"eval_{name}" for name in run.objective.evaluation_metrics]
    traced = run.sharded.trace(shapes_of(run).abstract())
    return sorted({*traced.out_info[1], "eval_loss", *(own or [name for name in _USUAL if name[:5] == "eval_"])})


def _apart(do: Callable[..., Any], *words: Any) -> Any:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(_leave_memory).result()
        return pool.submit(do, *words).result()


def _leave_memory() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # trials may be running on these devices
