"""Search for layouts: which exist, which fit, and which is fastest, with few traces.

The search has three rounds, each with fewer layouts and more work per layout: all meshes by a rough estimate without a
trace; the most promising ones with full activation checkpointing, which needs the least memory; and for the fastest
that fit, less checkpointing, other numbers of micro-batches, and other schedules.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from jaxtrain.base.annotations import JsonObject
from jaxtrain.builder import build
from jaxtrain.config.part_tables import moments_of
from jaxtrain.config.remat_policies import AUTO
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError
from jaxtrain.plan.cost import rough
from jaxtrain.plan.estimate import change, divisors, estimate
from jaxtrain.plan.report.answers_room import GATHER
from jaxtrain.plan.report.table import Choice, Found
from jaxtrain.plan.targets import Target, in_gigabytes
from jaxtrain.train_step import precision

CAREFUL = 0.95  # of the memory is filled by train.remat=auto: predictions err by some percent
WORTH = 0.97  # of the time: what copies to hosts must gain, since they compete with the data loader and with saves
VARIANTS, FEW = 6, 2  # layouts that a mesh is estimated with in detail, about; where there is much room
ON_HOSTS = "attention+heads+kv_heads+mlp@host"
STRATEGY = "mesh.context_strategy"
ROOMY = 8  # times what full activation checkpointing takes: where there is so much, all results will probably fit
REMATS = ("attention", "dots", "attention_and_dots", "none")  # besides "full"; the more is kept, the less is repeated


def search(config: Config, target: Target, devices: int, *, meshes_traced: int = 0, refined: int = 0,
           precisions: Sequence[str] = (), progress: Callable[[int, int], None] = lambda done, ahead: None) -> Found:
    """Search for about a minute of one core at most: by default 16 meshes, and 4 of them in detail.

    For models with experts, or of images or speech, it is 6 and 2, because they take up to three times as long to
    trace. (The limits are numbers rather than times, so that all processes of a run decide the same.) `precisions`:
    others than the config's, each of which takes as long again. `progress` gets the number of layouts that were
    estimated, and about that of those to come.
    """
    found = Found(config, target, devices)
    look = _Looker(found, progress)
    usual = (6, 2) if config.model.experts.num or not config.model.flops_known else (16, 4)
    meshes_traced, refined = meshes_traced or usual[0], refined or usual[1]
    now = precision.resolve(config.train.precision, target.platform)
    others = [{"train.precision": other} for other in dict.fromkeys(precisions) if other != now]
    promising = _promising(look, meshes_traced, may_offload=True)
    for rounds, more in enumerate((None, *others)):
        later = len(others) - rounds
        smallest = []
        for at, (mesh, offload) in enumerate(promising):
            look.ahead(len(promising) * (1 + later) - at + refined * look.variants() * (1 + later))
            if choice := look.smallest(mesh, offload, more):
                smallest.append(choice)
                if not choice.estimate.fits:
                    smallest += filter(None, (look.smallest(mesh, offload, {**(more or {}), STRATEGY: strategy})
                                              for strategy in look.other_strategies(choice)))
        fastest = sorted((c for c in smallest if c.estimate.fits), key=lambda choice: choice.estimate.seconds)[:refined]
        for at, choice in enumerate(fastest):
            look.ahead((len(fastest) - at + refined * later) * look.variants() + len(promising) * later)
            look.refine(choice)
    found.sort()
    if (best := found.best) and not precisions:
        other = {**best.overrides, "train.precision": "float32" if now in ("bfloat16", "float16") else "bfloat16"}
        with contextlib.suppress(UserError):
            found.otherwise = Choice(other, estimate(change(config, {**other, "mesh.auto": False}), target, devices))
    return found


def fastest_mesh(config: Config, target: Target, devices: int, meshes_traced: int = 12) -> Found:
    """Search only for the mesh, with everything else as in the config; if none fits, do a whole search."""
    if config.train.remat == AUTO:
        return search(config, target, devices)
    found = Found(config, target, devices)
    look = _Looker(found)
    zero = {"optimizer.zero_stage": config.optimizer.zero_stage}
    for mesh, _ in _promising(look, meshes_traced, config.train.accumulation, config.optimizer.zero_stage):
        look.at({**mesh, **zero, "train.accumulation": config.train.accumulation, "train.remat": config.train.remat})
    found.sort()
    for choice in (found.fitting or found.too_large)[:2]:
        look.across(choice)
    found.sort()
    return found if found.best else search(config, target, devices)


class _Looker:
    def __init__(self, found: Found, progress: Callable[[int, int], None] = lambda done, ahead: None):
        self.found, self.progress = found, progress
        self.done = self.end = 0

    def ahead(self, count: int) -> None:
        """Note about how many layouts are to come."""
        self.end = self.done + count

    def variants(self) -> int:
        """Return about how many layouts a mesh is estimated with in detail."""
        return FEW if any(map(self.roomy, self.found.fitting)) else VARIANTS

    def roomy(self, choice: Choice) -> bool:
        """Return whether a layout, with full activation checkpointing, leaves much room."""
        return ROOMY * choice.estimate.memory.total() < self.found.target.room

    def can_offload(self, mesh: dict[str, int]) -> bool:
        """Return whether the optimizer's state can be offloaded to separate host memory, and is not yet."""
        asked, elsewhere = self.found.config.optimizer, self.found.target.platform != "cpu"
        return elsewhere and not asked.offload and mesh["mesh.stage"] == 1 and bool(moments_of(asked.name))

    def at(self, overrides: JsonObject) -> Choice | None:
        """Estimate one layout; return None if it is refused."""
        self.done += 1
        self.progress(self.done, max(0, self.end - self.done))
        try:
            config = change(self.found.config, {**overrides, "mesh.auto": False})
            choice = Choice(overrides, estimate(config, self.found.target, self.found.devices))
        except UserError as error:
            self.found.refused.append((overrides, f"{error}"))
            return None
        self.found.add(choice)
        return choice

    def smallest(self, mesh: dict[str, int], offload: bool = False,
                 more: JsonObject | None = None) -> Choice | None:
        """Estimate a mesh with full activation checkpointing, in the least memory.

        The batch goes through at once, or, if that does not fit, in as few parts as possible, or with the optimizer's
        state in the hosts' memory. `more`: additional keys.
        """
        keys = {**mesh, "optimizer.zero_stage": _zero(self.found.config, mesh), "train.remat": "full", **(more or {})}
        keys |= {"optimizer.offload": True} if offload else {}
        once = self.at({**keys, "train.accumulation": 1})
        if once is None or once.estimate.fits:
            return once
        if once.estimate.worst[0] and self.found.config.rl.gather_weights and GATHER not in keys:
            choice = self.smallest(mesh, offload, {**(more or {}), GATHER: False})
            if choice and choice.estimate.fits:
                return choice
        if mesh["mesh.stage"] > 1:
            return once
        # What the state leaves must hold the rest, mostly of the batch; try one more size if that does not suffice.
        fixed = once.estimate.memory["parameters"] + once.estimate.memory["optimizer"]
        left = self.found.target.room - fixed
        wanted = (once.estimate.memory.total() - fixed) / left if left > 0 else float("inf")
        possible = divisors(rough.rows(self.found.config, mesh))
        for accumulation in [n for n in possible if n >= wanted][:2] or possible[-1:]:
            choice = self.at({**keys, "train.accumulation": accumulation}) if accumulation > 1 else None
            if choice and choice.estimate.fits:
                return choice
        return self.smallest(mesh, True, more) if self.can_offload(mesh) and not offload else None

    def keep_more(self, start: Choice, offloads: bool = False) -> Choice:
        """Return the fastest of a layout that fits and those that keep more and more for the backward pass, while they
        fit. `offloads`: the optimizer's state may make room on the devices.
        """
        fits, best, keys, seen = start, start, dict(start.overrides), {}
        if self.roomy(start):
            seen["none"] = everything = self.at({**keys, "train.remat": "none"})
            if everything and everything.estimate.fits:  # what keeps less only repeats more
                return min(start, everything, key=lambda c: c.estimate.seconds)
        for remat in REMATS:
            choice = seen[remat] if remat in seen else self.at({**keys, "train.remat": remat})
            if choice and not choice.estimate.fits and offloads and not keys.get("optimizer.offload"):
                keys["optimizer.offload"] = True
                choice = self.at({**keys, "train.remat": remat})
            if choice is None:
                break
            if not choice.estimate.fits:
                mixed, hosted = self.between(fits, choice), self.on_hosts(keys)
                best = min(best, mixed or best, key=lambda c: c.estimate.seconds)
                return hosted if hosted and hosted.estimate.seconds < WORTH * best.estimate.seconds else best
            fits, best = choice, min(best, choice, key=lambda c: c.estimate.seconds)
        return best

    def between(self, fits: Choice, larger: Choice) -> Choice | None:
        """Return the layout between these two whose first layers keep what `fits` keeps, and as many as possible of the
        others what `larger` keeps; None where all layers have one policy, or there would be no such layer.
        """
        layers, room = self.found.config.model.stacked_layers, self.found.target.room
        one_policy = fits.mesh["mesh.stage"] > 1 or self.found.config.model.period > 1
        if one_policy or fits.overrides.get("optimizer.offload") != larger.overrides.get("optimizer.offload"):
            return None
        most, least = (choice.estimate.memory.total() for choice in (larger, fits))
        of_a_layer = (most - least) / layers
        first = math.ceil((most - room) / of_a_layer) if of_a_layer > 0 else layers
        for count in (first, first + max(1, layers // 16)):  # where it takes more than the mean of both
            if not 0 < count < layers:
                return None
            remat = f"{fits.overrides['train.remat']}:{count},{larger.overrides['train.remat']}"
            choice = self.at({**larger.overrides, "train.remat": remat})
            if choice and choice.estimate.fits:
                return choice
        return None

    def on_hosts(self, keys: JsonObject) -> Choice | None:
        """Return the layout that keeps the results of the wide products in the hosts' memory, if the model has them."""
        if self.found.target.platform == "cpu" or keys["mesh.stage"] > 1:
            return None
        choice = self.at({**keys, "train.remat": ON_HOSTS})
        return choice if choice and choice.estimate.fits else None

    def other_strategies(self, choice: Choice) -> tuple[str, ...]:
        """Return the strategies of context parallelism for this layout besides the one that `auto` means there."""
        here = choice.estimate.strategy if self.found.config.mesh.context_strategy == "auto" else ""
        others = {"ulysses": ("ring", "gather"), "ring": ("gather",)}.get(here, ())  # ulysses wherever it is possible
        return tuple(other for other in others if other != "ring" or choice.mesh["mesh.stage"] == 1)

    def across(self, choice: Choice) -> None:
        """Estimate a layout with the other strategies of context parallelism."""
        for strategy in self.other_strategies(choice):
            self.at({**choice.overrides, STRATEGY: strategy})

    def refine(self, start: Choice) -> None:
        """Estimate variants that fit: less checkpointing, as many or twice as many micro-batches, other schedules and
        strategies of context parallelism.
        """
        best, rows = start, rough.rows(self.found.config, start.mesh)
        parts = [n for n in divisors(rows) if n >= start.overrides["train.accumulation"]][:2]
        for accumulation in parts if start.mesh["mesh.stage"] == 1 else parts[:1]:
            keys = {**start.overrides, "train.accumulation": accumulation}
            if accumulation == start.overrides["train.accumulation"]:
                kept = self.keep_more(start, accumulation == parts[0] and self.can_offload(start.mesh))
            elif (kept := self.at(keys)) and kept.estimate.fits:
                kept = self.keep_more(kept)
            if kept and kept.estimate.fits:
                best = min(best, kept, key=lambda c: c.estimate.seconds)
                if kept.overrides["train.remat"] == "none":
                    break  # smaller micro-batches would only make room
        self.across(best)
        if start.mesh["mesh.data"] > 1 and not self.found.config.optimizer.zero_stage:
            self.at({**best.overrides, "optimizer.zero_stage": 0})
        if (stages := start.mesh["mesh.stage"]) > 1:
            for schedule, chunks in (("interleaved", 2), ("zb_h1", 1)):
                whole = self.found.config.model.staged_layers % (stages * chunks) == 0
                if schedule != self.found.config.pipeline.schedule and whole:
                    self.at({**best.overrides, "pipeline.schedule": schedule, "pipeline.chunks": chunks})


def _promising(look: _Looker, most: int, accumulation: int = 1, zero_stage: int | None = None,
               may_offload: bool = False) -> list[tuple[dict[str, int], bool]]:
    """Return the meshes that are worth a trace, most promising first, and whether each offloads the optimizer's state.

    It does if the config says so or, with `may_offload`, if the state does not fit otherwise.
    """
    found = look.found
    room, size = found.target.room, rough.Size.of(found.config, found.target.described)
    scored = []
    for mesh in meshes(found.config, found.target, found.devices):
        zero = zero_stage if zero_stage is not None else _zero(found.config, mesh)
        away = found.config.optimizer.offload or (
            may_offload and size.state(mesh, zero, False) > room and look.can_offload(mesh))
        if (state := size.state(mesh, zero, away)) > room:
            alone = "parameters" if away else "parameters and optimizer"
            why = f"{alone} alone take at least {in_gigabytes(state)} of {in_gigabytes(room)}"
            found.refused.append((mesh, why))
            needed = found.devices * state / room
            count = 2 ** math.ceil(math.log2(needed))
            found.least = min(found.least or (count, alone), (count, alone))
        else:
            copied = 2 * size.moments(mesh, zero) / found.target.host if away else 0.0
            seconds = rough.seconds(found.config, found.target, mesh, size, room - state) + copied
            scored.append((seconds, len(scored), mesh, zero, away))
    scored.sort()
    found.least = None if scored else found.least
    taken = []
    for _, _, mesh, zero, away in scored:
        if len(taken) == most:
            found.refused.append((mesh, "by a rough estimate slower than those above"))
            continue
        config = change(found.config, {**mesh, "mesh.auto": False, "optimizer.zero_stage": zero,
                                       "train.accumulation": accumulation,
                                       "optimizer.offload": away})
        try:
            build(config, devices=found.devices, platform=found.target.described)
        except UserError as error:
            found.refused.append((mesh, f"{error}"))
        else:
            taken.append((mesh, away))
    return taken


def _zero(config: Config, mesh: dict[str, int]) -> int:
    """Return the ZeRO stage of a mesh: several copies of a model need only one of the optimizer."""
    return config.optimizer.zero_stage or int(mesh["mesh.data"] > 1 and not config.compression.method)


def meshes(config: Config, target: Target, devices: int) -> Iterator[dict[str, int]]:
    """Yield sizes of the axes whose product is the number of devices, simplest first."""
    model, data = config.model, config.data
    near = target.links[0].devices
    for stage in divisors(devices):
        if stage > model.staged_layers:
            break
        for tensor in divisors(devices // stage):
            if tensor > min(near, 16, model.num_kv_heads) or model.num_heads % tensor or model.mlp_dim % tensor:
                continue
            for context in divisors(devices // stage // tensor):
                if context > 1 and (data.seq_len // context < 2048 or data.seq_len % (2 * context)):
                    break
                for expert in divisors(devices // stage // tensor // context):
                    if expert > 1 and (not model.experts.num or model.experts.num % expert):
                        continue
                    rest = devices // stage // tensor // context // expert
                    for fsdp in sorted({rest, min(rest, max(1, near // tensor)), 1}, reverse=True):
                        if rest % fsdp == 0:
                            yield {"mesh.data": rest // fsdp, "mesh.fsdp": fsdp, "mesh.stage": stage,
                                   "mesh.context": context, "mesh.expert": expert, "mesh.tensor": tensor}


def remat_that_fits(config: Config, target: Target, devices: int) -> Choice | None:
    """Return a config on its own mesh with the `train.remat` that keeps as much as fits; None if nothing fits."""
    careful = replace(target, memory=CAREFUL * target.memory)
    look = _Looker(Found(config, careful, devices))
    mesh = {f"mesh.{axis}": size for axis, size in _sizes(config, target, devices).items()}
    keys = {**mesh, "train.accumulation": config.train.accumulation}
    everything = look.at({**keys, "train.remat": "none"})
    if everything and everything.estimate.fits:
        return everything
    least = look.at({**keys, "train.remat": "full"})
    return look.keep_more(least) if least and least.estimate.fits else None


def _sizes(config: Config, target: Target, devices: int) -> Mapping[str, int]:
    alone = replace(config, train=replace(config.train, remat="full"))
    return build(alone, devices=devices, platform=target.described).mesh.shape


def beside(config: Config, target: Target, devices: int) -> Choice | None:
    """Return the nearest layout for a config that does not fit: on its own mesh if possible, else the best of all."""
    sizes = _sizes(config, target, devices)
    found = Found(config, target, devices)
    look = _Looker(found)
    start = look.smallest({f"mesh.{axis}": size for axis, size in sizes.items()})
    if start and start.estimate.fits:
        look.refine(start)
        found.sort()
        return found.best
    return search(config, target, devices).best
