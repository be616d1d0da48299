"""Rematerialization (activation checkpointing): what layers keep for the backward pass, and what they compute again."""

from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.remat_policies import Policy, policies
from jaxtrain.config.schema import TrainConfig
from jaxtrain.kernels.attention.cudnn_attention import kept_results

Wrap = Callable[[Callable], Callable]  # a layer's function -> one with the same results


def layers_at_once(model: ModelConfig, train: TrainConfig, platform: str, pipeline: bool = False) -> int:
    """Return how many layers form an iteration of the loop over layers (0: all, so that there is no loop).

    Without a loop what a layer keeps is not copied into arrays of all layers and back, and the compiler overlaps the
    communication of one layer with the computation of the next. But it compiles for longer, and where layers keep
    little it holds on to more of other things. docs/performance.md has figures.
    """
    kind = platform.partition(":")[0]
    kept = [policy for policy, _ in policies(train.remat, model.stacked_layers)]
    if kind in ("", "cpu") and not all(policy.everything for policy in kept):
        return 1  # XLA for CPU would merge both computations of an unrolled layer
    if train.unroll >= 0:
        return train.unroll
    pays = all(policy.keeps_products for policy in kept) and model.num_layers <= 48 and not pipeline
    return 0 if pays and kind in ("gpu", "cuda") else 1


def cut(kept: list[tuple[Policy, int]], begin: int, end: int) -> list[tuple[Policy, int]]:
    """Return the part of `policies` that is for the layers from `begin` to `end`."""
    found, at = [], 0
    for one, count in kept:
        here = min(at + count, end) - max(at, begin)
        found += [(one, here)] if here > 0 else []
        at += count
    return found


def wrap(policy: Policy, in_loop: bool = False) -> Wrap:
    """Return a function that makes a layer keep only this; outside a loop compilers are kept from merging repetitions.
    """
    if policy.everything:
        return lambda layer: layer
    return lambda layer: jax.checkpoint(layer, policy=_saveable(policy), prevent_cse=not in_loop)


def of_several_layers(remat: str, layers: int) -> Wrap:
    """Return a function that makes several layers keep what `train.remat` says, and no weights in another shape.

    Layers that keep only some results do so themselves.
    """
    if not policies(remat, layers)[0][0].everything:
        return lambda layers: layers
    return lambda layers: jax.checkpoint(
        layers, policy=lambda primitive, *_, **__: primitive.name not in ("reshape", "reshard"), prevent_cse=False)


def _saveable(policy: Policy) -> Callable[..., Any]:
    kinds, products = jax.checkpoint_policies, jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    named = kinds.save_only_these_names(*policy.kept)
    hosted = kinds.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=policy.hosted, offload_src="device",
        offload_dst="pinned_host")

    def saveable(primitive, *args, **params):
        if policy.hosted and primitive.name == "name" and params["name"] in policy.hosted:
            return hosted(primitive, *args, **params)
        return (named(primitive, *args, **params)
                or ("dots" in policy.names and products(primitive, *args, **params))
                or ("attention" in policy.names and kept_results(primitive)))

    return saveable
