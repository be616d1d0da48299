"""Plan for the available devices: choose the mesh of `mesh=auto`, and refuse runs that cannot fit."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from jaxtrain.config.hybrid_mesh import with_hybrid_mesh
from jaxtrain.config.remat_policies import AUTO, KEY
from jaxtrain.config.schema import Config
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError, say
from jaxtrain.plan import targets
from jaxtrain.plan.targets import gigabytes, in_gigabytes
from jaxtrain.run import Run, abstract_model, identity
from jaxtrain.sharding.mesh import slices_of
from jaxtrain.train_step.report import total

if TYPE_CHECKING:  # the planner is imported where something is planned: few runs on CPU need it
    from jaxtrain.plan.estimate import Estimate

_MISTAKE = 1000  # times the memory: no number of devices is meant, but another number in the config
SURELY = 1.15  # of the memory: beyond the largest error of a prediction (docs/planner.md)


def resolve(config: Config, devices: Any, *, own_parts: bool = False) -> Config:
    """Replace `mesh=auto` by the fastest mesh for these devices, `mesh=hsdp` by its sizes, and `train.remat=auto` by
    what keeps most.

    If nothing fits, a UserError says what to change. `own_parts`: whether the objective, the optimizer or an
    extension is not the config's.
    """
    if config.mesh.hsdp:
        if isinstance(devices, int):
            raise UserError("mesh.hsdp", "it is not known how devices that are not here are grouped into nodes",
                            "set mesh.data and mesh.fsdp")
        nodes = slices_of(devices)[0]
        if 1 < len(devices) == nodes:
            raise UserError("mesh.hsdp", "each process has one device, so it is not known which devices share a node",
                            "start one process per node, or set mesh.data and mesh.fsdp")
        config = with_hybrid_mesh(config, len(devices), len(devices) // nodes)
        if jax.process_index() == 0:
            say(f"mesh=hsdp: data={config.mesh.data} fsdp={config.mesh.fsdp}")
    chosen = "mesh.auto" if config.mesh.auto else KEY if config.train.remat == AUTO else ""
    if not chosen:
        return config
    if own_parts:
        raise UserError(chosen, "the planner knows only objectives, optimizers and extensions that a config names",
                        "set sizes for the mesh axes" if config.mesh.auto else "name a policy, such as full")
    if isinstance(devices, int):
        raise UserError(chosen, "there are no devices to choose for", "use jaxtrain plan --target=...")
    from jaxtrain.plan import search

    target = _target(list(devices))
    if not config.mesh.auto:
        choice = search.remat_that_fits(config, target, len(devices))
        remat = choice.estimate.config.train.remat if choice else "full"  # which check() refuses, with what fits
        if jax.process_index() == 0:
            say(f"train.remat=auto: {remat}" + (f", predicted {shown(choice.estimate)}" if choice else ""))
        return dataclasses.replace(config, train=dataclasses.replace(config.train, remat=remat))
    found = search.fastest_mesh(config, target, len(devices))
    if (choice := found.best) is None and not found.too_large and found.refused:
        raise UserError("mesh.auto", f"no mesh of {len(devices)} devices works: {found.refused[0][1]}",
                        "change the key that it names")
    if choice is None:
        raise UserError("mesh.auto", f"nothing fits {len(devices)} devices of {gigabytes(target.room)} GB",
                        "use more devices, a smaller model or shorter sequences")
    if jax.process_index() == 0:
        say(f"mesh=auto: {choice}, predicted {shown(choice.estimate)}")
    return choice.estimate.config


def check(run: Run) -> str:
    """Return a line with the predicted memory and time of a step; raise a `UserError` if it certainly does not fit.

    On CPU it is empty (and nothing is traced) for models whose state is a small part of the memory. Unknown devices or
    a failed prediction stop no run.
    """
    if identity.has_own_parts(run):
        return "memory and speed are not predicted, because the model, objective, optimizer or an extension is your own"
    devices = run.mesh.size
    # The mesh may have been given to `build` rather than by the config.
    config = dataclasses.replace(run.config, mesh=dataclasses.replace(run.config.mesh, auto=False, **run.mesh.shape))
    try:
        target = _target(list(run.mesh.devices.flat))
        if target.platform == "cpu" and total(run.abstract) + _inputs(config) / devices < target.room / 10:
            return ""
        from jaxtrain.plan import search
        from jaxtrain.plan.estimate import estimate
        from jaxtrain.plan.report.answers_room import room_for_answers

        guess = estimate(config, target, devices)
    except Exception as error:
        reason = f"{error}".splitlines()[0] if f"{error}" else type(error).__name__
        return f"memory and speed are not predicted: {reason}"
    host = guess.host * (2 if config.resilience.replay_every else 1)  # a replayed step starts from a copy
    if config.train.check_memory and host > target.host_room:
        raise UserError("optimizer.offload", f"it takes {gigabytes(host)} GB of the host's memory for each device, and "
                        f"{gigabytes(target.host_room)} GB are available", "use more hosts, or leave it on the devices")
    # For experts on GPUs too few programs were compared to refuse any.
    sure = config.train.check_memory and not (config.model.experts.num and target.platform == "cuda")
    if guess.bytes <= SURELY * target.room or not sure:
        return f"predicted: {shown(guess)}"
    phase, parts = guess.worst
    (part, size), *_ = parts.most_common(1)
    what = (f"{in_gigabytes(guess.bytes)} of a device's {in_gigabytes(target.room)}, {in_gigabytes(size)} of it "
            f"{part}")
    if phase and guess.memory.total() <= target.room:
        raise UserError("rl.prompts", f"answering {config.data.global_batch_size} prompts at once would take "
                        f"about {what}", room_for_answers(guess))
    if guess.bytes > _MISTAKE * target.room:
        rows, seq_len = config.data.global_batch_size, config.data.seq_len
        count = sum(leaf.size for leaf in jax.tree.leaves(abstract_model(run)))
        raise UserError("train.check_memory", f"a step would take about {what}", f"check the sizes in the config: the "
                        f"model has {count:,} parameters, and a step {rows:,} x {seq_len:,} tokens")
    nearest = search.beside(config, target, devices)
    keys = " ".join(f"{key}={value}" for key, value in nearest.overrides.items()) if nearest else ""
    raise UserError("train.check_memory", f"a step would take about {what}",
                    f"use {keys}" if keys else "use more devices, a smaller model or shorter rows")


def _inputs(config: Config) -> int:
    """Return the bytes of what layers take in a step, which is the least that is kept for the backward pass."""
    m, data = config.model, config.data
    return 4 * data.global_batch_size * data.seq_len * getattr(m, "embed_dim", 1) // config.train.accumulation


def _target(devices: list[jax.Device]) -> targets.Target:
    """Return a target with the least that any process has, so that all processes decide the same."""
    mine, unknown = None, None
    try:
        mine = targets.here(devices)
    except UserError as error:
        unknown = error
    facts = [mine.name, mine.memory, mine.bandwidth, mine.host_memory] if mine else ["", 0.0, 0.0, 0.0]
    name, memory, bandwidth, host_memory = exchange(facts, decide=min)
    if unknown or mine is None or name != mine.name:
        raise unknown or UserError("mesh", "processes have different kinds of devices", "use one kind of device")
    share = bandwidth / mine.bandwidth
    return dataclasses.replace(mine, memory=memory, bandwidth=bandwidth, host_memory=host_memory,
                               peak={dtype: rate * share for dtype, rate in mine.peak.items()})


def shown(guess: "Estimate") -> str:
    """Summarise an estimate in one line."""
    within = f" ({guess.interval[0]:.3g} to {guess.interval[1]:.3g})" if guess.interval else ""
    largest = ", ".join(f"{name} {gigabytes(size)}" for name, size in guess.worst[1].most_common(3))
    return (f"{gigabytes(guess.bytes)} of {gigabytes(guess.target.room)} GB a device ({largest}), "
            f"{guess.seconds:.3g} s a step{within}, {guess.tokens_per_second:,.0f} tokens/s" +
            (f", MFU {guess.mfu:.0%}" if guess.mfu_said else ""))
