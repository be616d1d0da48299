"""Plans for the devices that are here: for `mesh=auto`, and for runs that could not fit."""

import dataclasses
from typing import Any

import jax

from jaxtrain.config.schema import Config
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError, say
from jaxtrain.plan import search, targets
from jaxtrain.plan.estimate import Estimate, estimate, gigabytes
from jaxtrain.run import Run
from jaxtrain.train_step.report import total

SURELY = 1.15  # over what there is: beyond the worst error of a prediction (docs/planner.md)


def resolve(config: Config, devices: Any, *, own_parts: bool = False) -> Config:
    """Replace `mesh=auto` by the fastest mesh for these devices, or say what has to change for one to fit.

    `own_parts`: whether the objective or the optimizer is not the config's.
    """
    if not config.mesh.auto:
        return config
    if own_parts:
        raise UserError("mesh.auto", "the planner knows only the objective and optimizers that a config names",
                        "give the axes of mesh a size")
    if isinstance(devices, int):
        raise UserError("mesh.auto", "there are no devices to decide for", "ask python -m jaxtrain.plan --target=...")
    target = _target(list(devices))
    found = search.fastest_mesh(config, target, len(devices))
    if (choice := found.best) is None and not found.too_large and found.refused:
        raise UserError("mesh.auto", f"no mesh of {len(devices)} devices works: {found.refused[0][1]}",
                        "change what it names")
    if choice is None:
        raise UserError("mesh.auto", f"nothing fits {len(devices)} devices of {gigabytes(target.room)} GB",
                        "use more devices, a smaller model or shorter rows")
    if jax.process_index() == 0:
        say(f"mesh=auto: {choice}, predicted {shown(choice.estimate)}")
    return choice.estimate.config


def check(run: Run) -> str:
    """One line about what a step will need and take; raises a `UserError` where it surely does not fit.

    On CPU nothing is said (and traced) of a model whose state is a small part of the memory. That devices are not
    known, or that a prediction fails, stops no run.
    """
    if run.has_own_parts:
        return "nothing is predicted of a run with a model, objective or optimizer that its config does not name"
    devices = run.mesh.size
    try:
        target = _target(list(run.mesh.devices.flat))
        if target.platform == "cpu" and total(run.abstract) < target.room / 10:
            return ""
        guess = estimate(run.config, target, devices)
    except Exception as error:
        return f"nothing is predicted of this run: {f'{error}'.splitlines()[0] if f'{error}' else type(error).__name__}"
    host = guess.host * (2 if run.config.resilience.replay_every else 1)  # a step that is replayed starts from a copy
    if run.config.train.check_memory and host > target.host_room:
        raise UserError("optimizer.offload", f"it takes {gigabytes(host)} GB of the host's memory for each device, and "
                        f"{gigabytes(target.host_room)} GB can be had", "use more hosts, or leave it on the devices")
    # Of experts on GPUs too few programs were compared to refuse anything.
    sure = run.config.train.check_memory and not (run.config.model.num_experts and target.platform == "cuda")
    if guess.bytes <= SURELY * target.room or not sure:
        return f"predicted: {shown(guess)}"
    part, size = guess.memory.most_common(1)[0]
    nearest = search.beside(run.config, target, devices)
    keys = " ".join(f"{key}={value}" for key, value in nearest.overrides.items()) if nearest else ""
    raise UserError("train.check_memory", f"a step would take about {gigabytes(guess.bytes)} GB of a device's "
                    f"{gigabytes(target.room)} GB, {gigabytes(size)} GB of it {part}",
                    f"use {keys}" if keys else "use more devices, a smaller model or shorter rows")


def _target(devices: list[Any]) -> targets.Target:
    """As all processes see it alike: with as little as any of them has, so that all decide the same."""
    mine, unknown = None, None
    try:
        mine = targets.here(devices)
    except UserError as error:
        unknown = error
    facts = [mine.name, mine.memory, mine.bandwidth, mine.host_memory] if mine else ["", 0.0, 0.0, 0.0]
    name, memory, bandwidth, host_memory = exchange(facts, decide=min)
    if unknown or mine is None or name != mine.name:
        raise unknown or UserError("mesh", "devices are of different kinds", "give all processes the same")
    share = bandwidth / mine.bandwidth
    return dataclasses.replace(mine, memory=memory, bandwidth=bandwidth, host_memory=host_memory,
                               peak={dtype: rate * share for dtype, rate in mine.peak.items()})


def shown(guess: Estimate) -> str:
    """In one line."""
    largest = ", ".join(f"{name} {gigabytes(size)}" for name, size in guess.memory.most_common(3))
    return (f"{gigabytes(guess.bytes)} of {gigabytes(guess.target.room)} GB a device ({largest}), "
            f"{guess.seconds:.3g} s a step, {guess.tokens_per_second:,.0f} tokens/s" +
            (f", MFU {guess.mfu:.0%}" if guess.target.platform != "cpu" else ""))
