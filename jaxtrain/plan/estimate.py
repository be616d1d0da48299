"""Estimate one layout of a config on a target: its memory, its time, and whether it fits."""

import dataclasses
import importlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxtrain.base.annotations import JsonObject
from jaxtrain.builder import build
from jaxtrain.config import part_tables
from jaxtrain.config.schema import AXES, Config
from jaxtrain.models.rematerialization import layers_at_once
from jaxtrain.parallel import experts
from jaxtrain.plan.cost import links, memory, time, useful_flops
from jaxtrain.plan.cost.interval import interval
from jaxtrain.plan.cost.memory_parts import named
from jaxtrain.plan.targets import Target
from jaxtrain.plan.trace import kernels, reader
from jaxtrain.plan.trace.program import GPUS, Block, Collective
from jaxtrain.run import Run, across_context, shapes_of
from jaxtrain.sharding import axis_rules
from jaxtrain.sharding.mesh import axis_sizes
from jaxtrain.train_step.report import in_hosts, total

# How often stacks are written or read because of a loop on GPUs: as zeros, and when a part is copied into it (profile
# of 124M on one H200 with its layers in a loop).
STACKED = 3


@dataclass(frozen=True)
class Estimate:
    """The predictions for a step of `config` on `devices` devices of a target."""

    config: Config
    target: Target
    devices: int
    memory: Counter  # bytes of one device, by part
    time: time.Time
    talked: Counter  # (kind, axes) -> bytes of results on one device
    host: int  # bytes of the host's memory for each device
    useful: float  # FLOP of one device that the model needs, with causal attention; 0: not known
    answering: dict[str, Counter] = field(default_factory=dict)  # memory while prompts are answered, by phase
    documents: int = 1  # of equal length in each row
    computed: float = 0.0  # `useful`, without the pairs of different documents
    strategy: str = ""  # how attention crosses the parts of a sequence; "" if rows are whole

    @property
    def mesh(self) -> dict[str, int]:
        """The number of devices along each axis."""
        sizes = axis_sizes(tuple(getattr(self.config.mesh, axis) for axis in AXES), self.devices)
        return dict(zip(AXES, sizes, strict=True))

    @property
    def worst(self) -> tuple[str, Counter]:
        """The phase that needs the most memory ("": the step; or a phase of answering), and its memory by part."""
        return max([("", self.memory), *self.answering.items()], key=lambda one: one[1].total())

    @property
    def bytes(self) -> int:
        """The peak memory of one device."""
        return self.worst[1].total()

    @property
    def fits(self) -> bool:
        """Whether the step, and answering between steps, fit into the memory that a program may use."""
        return self.bytes <= self.target.room and self.host <= self.target.host_room

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return self.time.seconds

    @property
    def interval(self) -> tuple[float, float] | None:
        """The least and most seconds of a step, as far as published runs tell; None: they do not."""
        return interval(self.target.platform, self.seconds, self.config.model.experts.num)

    @property
    def interval_said(self) -> str:
        """The same as text, with that of the MFU where it is known."""
        if self.interval is None:
            return ""
        least, most = self.interval
        mfu = f", MFU {self.mfu * self.seconds / most:.0%} to {self.mfu * self.seconds / least:.0%}"
        return f"{least:.3g} to {most:.3g} s{mfu if self.mfu_said else ''}"

    @property
    def rates_said(self) -> str:
        """The target whose rates a prediction has, as text, if none was fitted to runs on its own; "" if some were."""
        target = self.target
        return f"rates of {target.rates_of}: none was fitted to runs on {target.name}" if target.rates_of else ""

    @property
    def tokens_per_second(self) -> float:
        """The throughput of all devices together."""
        return self.config.data.global_batch_size * self.config.data.seq_len / self.seconds

    @property
    def mfu(self) -> float:
        """The share of the bfloat16 peak that the model's own arithmetic reaches; 0: not known."""
        return self.useful / self.seconds / self.target.peak["bfloat16"]

    @property
    def mfu_computed(self) -> float:
        """The same without pairs of tokens of different documents, which `mfu` counts although kernels skip them."""
        return self.computed / self.seconds / self.target.peak["bfloat16"]

    @property
    def mfu_said(self) -> str:
        """The same as text; "" where it is not known, and for CPUs, whose peak is not."""
        return f"{self.mfu:.1%}" if self.useful and self.target.platform != "cpu" else ""

    def days(self, tokens: float) -> float:
        """Return the days to train on this many tokens, without interruptions."""
        return tokens / self.tokens_per_second / 86_400

    def cost(self, tokens: float) -> float:
        """Return the dollars to train on this many tokens, at the target's price."""
        return self.days(tokens) * 24 * self.devices * self.target.price


def estimate(config: Config, target: Target, devices: int, documents: int = 1) -> Estimate:
    """Trace the step for this many devices and estimate it; raises a `UserError` for what `build` refuses.

    `documents`: of equal length in each row.
    """
    # Layers in a loop take the same memory, within a few percent, and are traced once.
    traceable = config if target.platform == "cpu" else dataclasses.replace(
        config, train=dataclasses.replace(config.train, unroll=1))
    with kernels.stand_ins():
        run = build(traceable, devices=devices, platform=target.described)
        traced = run.sharded.trace(shapes_of(run).abstract())
    sizes = dict(run.mesh.shape)
    filled = experts.filled(config.model.experts, axis_rules.shards(run.sharded.rules["experts"], run.mesh),
                            config.train.expert_buffer)
    block = reader.read(traced.jaxpr, sizes, target.platform, target.rings, filled, config.model.windows,
                        documents=documents)
    state = len(jax.tree.leaves(run.abstract))
    in_loop = layers_at_once(config.model, config.train, target.platform, config.mesh.stage > 1) == 1
    # Hybrids compute each layer's gradients before XLA may go on (models/gradient_order.py).
    free = target.platform in GPUS and not getattr(config.model, "layer_pattern", ())
    worst = memory.peak(block, state, free, free and in_loop)
    elsewhere = in_hosts(run.abstract) if target.platform != "cpu" else 0  # on CPU it is the same memory
    parts = Counter({
        "parameters": total(run.abstract.params),
        "optimizer": total(run.abstract.opt_state) - elsewhere})
    if frozen := total(run.abstract.frozen):
        parts["frozen parameters"] = frozen
    phases = {}
    for one in run.extensions:
        if one.state_words and (size := sum(total(run.abstract.extras[name]) for name in one.extra_state())):
            parts[one.state_words] = size
    for one in run.extensions:
        if one.planned:
            module, _, name = one.planned.partition(":")
            with kernels.stand_ins():
                phases |= getattr(importlib.import_module(module), name)(run, target, devices, parts)
    parts["batch"] = sum(value.bytes for value in block.inputs[state:])
    parts.update(named(worst, run.abstract.params))
    if target.platform != "cpu":
        elsewhere += _kept_on_hosts(block)
    talked: Counter = Counter()
    for op, times in block.all():
        for found in op.collectives:
            talked[found.kind, tuple(axis for axis in sizes if axis in found.axes)] += found.bytes * times
    rows = config.data.global_batch_size / devices
    useful, computed = useful_flops.of_row(run) * rows, useful_flops.of_row(run, documents) * rows
    took = time.estimate(block, target, sizes, run.schedules[0] if run.schedules else None)
    if target.platform in GPUS and in_loop:
        took.spend(STACKED * _stacked(block) / (target.bandwidth * target.efficiency["memory"]), "memory")
    for collective in _by_optimizer(run, target.platform):
        axes = tuple(axis for axis in sizes if axis in collective.axes)
        talked[collective.kind, axes] += collective.bytes
        took.spend(links.seconds(collective, target, sizes), time.said(collective.kind, axes))
    strategy = across_context.of(run)
    return Estimate(config, target, devices, parts, took, talked, elsewhere, useful, phases, documents, computed,
                    strategy.name if strategy else "")


def _by_optimizer(run: Run, platform: str) -> Iterator[Collective]:
    """Yield what devices exchange in the optimizer's update, which is not in the trace; nothing of it is hidden."""
    c = run.config.optimizer
    module, _, name = getattr(part_tables.OPTIMIZERS.load(c.name), "exchanged", "").partition(":")
    if module:
        found = getattr(importlib.import_module(module), name)(c, run.abstract, run.layout, platform)
        yield from itertools.starmap(Collective, found)


def _stacked(block: Block) -> float:
    """Return the bytes of what a loop over layers leaves in stacks: what they keep, and gradients."""
    loops = ((op, times) for op, times in block.all() if op.name == "scan" and op.times > 1)
    return sum(times * value.bytes for op, times in loops
               if any(inner.flops for body in op.bodies for inner, _ in body.all())
               for value in op.outputs[op.carried:])


def _kept_on_hosts(block: Block) -> int:
    """Return the bytes of what layers keep in the host's memory for the backward pass."""
    loops = [op for op, _ in block.all() if op.name == "scan"]
    layers = [op for op in loops if any(inner.flops for body in op.bodies for inner, _ in body.all())]
    return sum(value.host for op in layers for value in op.outputs)


def change(config: Config, overrides: JsonObject) -> Config:
    """Return the config with some keys changed."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return dataclasses.replace(config, **{
        section: dataclasses.replace(getattr(config, section), **keys) for section, keys in sections.items()})


def divisors(n: int) -> list[int]:
    """Return all divisors of a number, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
