"""`jt.prove`: run a few steps on layouts drawn at random, and compare every number with those of one device."""

import dataclasses
import datetime
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from jaxtrain.base import arguments
from jaxtrain.base.annotations import JsonMapping, JsonObject, PyTree
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError
from jaxtrain.observe.versions import git_commit, version_of
from jaxtrain.plan.estimate import change
from jaxtrain.proof import drawn_layouts, proof_size
from jaxtrain.proof.drawn_layouts import Layout
from jaxtrain.proof.reference import FALSE_ALARMS, Reference, measure
from jaxtrain.proof.trial import NORM, Quantity, Subject, named, real, record, start_of
from jaxtrain.proof.wrong_quantities import Comparison, Finding, compare
from jaxtrain.run import Run, certificate, runinfo
from jaxtrain.train_step.state import TrainState

DEVICES = 8  # of the largest mesh
_MOST_TRIES = 16  # layouts that are tried to find the smallest one that is wrong


@dataclass(frozen=True)
class Proof:
    """The result of `jt.prove`: print it, or read its fields."""

    certificate: JsonObject
    comparisons: list[Comparison]
    finding: Finding | None = None  # what is wrong, on the smallest layout that shows it
    path: Path | None = None  # where the certificate lies

    @property
    def proven(self) -> bool:
        """Whether all layouts gave the numbers of one device."""
        return self.finding is None

    @property
    def worst(self) -> float:
        """The largest error, as a multiple of the tolerance."""
        return max(one.worst for one in self.comparisons)

    def __str__(self) -> str:
        c = self.certificate
        head = (f"{len(self.comparisons)} layouts, {c['steps']} steps each, {c['compared']:,} numbers: " + (
            "the last one does not have the numbers of one device" if self.finding else
            f"all have the numbers of one device; the largest error is {self.worst:.2g} of its tolerance "
            f"({max(self.comparisons, key=lambda one: one.worst).where})"))
        errors = [(layout, why) for layout, why in c["refused"].items() if not why.startswith("UserError: ")]
        coarse = (f"not a proof, and no certificate: rounding in {c['precision']} hides errors, and may turn the signs "
                  f"that some optimizers go by; {certificate.PRECISION} decides")
        return "\n".join([head, *(f"cannot run on {layout}: {why}" for layout, why in errors[:3]),
                          *([f"WRONG {self.finding}"] if self.finding else []),
                          *([coarse] if c["precision"] != certificate.PRECISION else [])])

    __repr__ = __str__


def prove(config: Config, *, meshes: int = 20, steps: int = 3, seed: int = 0, precision: str = "float32",
          output: str | Path | None = None, report: Callable[[str], None] = lambda text: None,
          config_name: str = "", **parts: object) -> Proof:
    """Prove that a run gives on meshes drawn at random the numbers of one device, or show where it does not.

    Compared are the loss, the gradient of every parameter, its norm, the clipping, the update, the optimizer's state
    and further ones such as averages of weights, after each of a few steps. docs/prove.md explains the tolerance.

    Args:
        config: as `jt.build` takes it; models of a config are proven with narrower layers if they are large.
        meshes: how many layouts are drawn: products of mesh axes, with micro-batches, rematerialisation, ZeRO stages,
            pipeline schedules and strategies of attention.
        steps: how many steps are made on each.
        seed: of the draws.
        precision: in which to compute; float32 shows what coarser dtypes hide, for which there is no certificate.
        output: the folder to write the certificate into; None: it is not written.
        report: called with a line of text for each layout.
        config_name: what the certificate calls the config.
        parts: whatever else `jt.build` is given: model, loss_fn, optimizer, data, objective, extensions.
    """
    began = time.monotonic()
    _check(config, meshes, steps, seed, parts)
    code, about = certificate.hashes_of(Subject(change(config, proof_size.length(config)), parts).build(Layout()))
    output = output if precision == certificate.PRECISION else None
    again = certificate.refuted(code, about, output) if output is not None else {}
    if steps < again.get("step", 0):
        raise UserError("steps", f"{certificate.name_of(code, about)} in {output} says that step {again['step']} was "
                        f"wrong on {again['layout']}, and {steps} are too few to show it", "give as many or more")
    subject, changed = proof_size.of(config, parts, precision)
    devices = min(DEVICES, 2 ** (jax.device_count().bit_length() - 1))
    start, batches, reference, subject = _reference(subject, steps, seed)
    compared = reference.size * meshes
    report(f"one device: {time.monotonic() - began:.0f} s" + (
        f"; {reference.missing} has no float64, so that the mean of several runs is the truth" * bool(
            reference.missing)))
    trials = _Trials(subject, start, batches, reference, compared)
    done, refused = _drawn(trials, meshes, seed, devices, report, [Layout(again["keys"])] if again else [])
    finding = _smallest(trials, done[-1].finding, report) if done[-1].finding else None
    found = _certificate(code, about, config_name, reference, done, finding, dict(
        refused=refused, changed=changed, steps=steps, seed=seed, compared=compared, precision=precision,
        seconds=round(time.monotonic() - began, 1)))
    path = certificate.write(found, output) if output is not None else None
    return Proof(found, done, finding, path)


@dataclass
class _Trials:
    """Runs layouts, each once."""

    subject: Subject
    start: TrainState
    batches: Sequence[PyTree]
    reference: Reference
    compared: float
    known: dict[str, Comparison] = field(default_factory=dict)
    drawn_alike: list[set[str]] = field(default_factory=list)  # sets of axes on which initial values are right

    def run(self, layout: Layout, steps: int = 0) -> Comparison:
        """Return how a layout compares after so many steps (0: all), or raise the `UserError` that refuses it."""
        key = f"{layout}, {steps}"
        if key not in self.known:
            began = time.monotonic()
            run = self.subject.build(layout)
            initial = self._initial(layout, run)
            got = record(run, self.start, self.batches[:steps or None])
            result = compare(self.reference, got, layout, run, self.compared, initial)
            self.known[key] = dataclasses.replace(result, seconds=time.monotonic() - began)
        return self.known[key]

    def _initial(self, layout: Layout, run: Run) -> dict[str, float]:
        """Return how far initial values are off, as a multiple of what is allowed; of axes that were seen, nothing."""
        axes = set(layout.sizes)
        if any(axes <= seen for seen in self.drawn_alike):
            return {}
        found = {name: _off(x, y) for (name, x), (_, y) in zip(
            named(start_of(run).params), named(self.start.params), strict=True)}
        if max(found.values(), default=0.0) <= 1:
            self.drawn_alike.append(axes)
        return found


def _off(got: np.ndarray, want: np.ndarray) -> float:
    """Return how far an initial value is off, where a few roundings are allowed."""
    if np.shape(got) != np.shape(want):
        return float("inf")
    got, want = real(got).astype(np.float64), real(want).astype(np.float64)
    return float(np.abs(got - want).max(initial=0) / (np.abs(want).max(initial=0) * 8 * 2**-24 or 1e-30))


def _check(config: Config, meshes: int, steps: int, seed: int, parts: JsonMapping) -> None:
    arguments.is_config(config)
    arguments.is_seed("seed", seed)
    for name, number in (("meshes", meshes), ("steps", steps)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise UserError(name, f"{number!r} is not a number of {name}", "give 1 or more")
    for name in ("mesh", "devices", "platform"):
        if name in parts:
            raise UserError(name, "a proof chooses its meshes itself", "leave it out")
    if jax.device_count() < 2:
        raise UserError("devices", "there is one device, and a mesh needs several", "set "
                        f"XLA_FLAGS=--xla_force_host_platform_device_count={DEVICES} and JAX_PLATFORMS=cpu before JAX "
                        "starts")
    if config.compression.method not in ("", "exact") or config.diloco.count:
        key = "diloco.count" if config.diloco.count else "compression.method"
        raise UserError(key, "it changes the numbers of a step on purpose, from mesh to mesh", "prove the config "
                        "without it")


def _reference(subject: Subject, steps: int, seed: int) -> tuple[TrainState, list[PyTree], Reference, Subject]:
    """Return the initial state, the batches and the numbers of one device; the norm is above the limit of clipping."""
    one = subject.build(Layout())
    start = start_of(one)
    batches = proof_size.batches_of(one, steps, seed)
    proof_size.check_memory(one, batches[0])
    clip = subject.config.optimizer.clip_norm
    norm = float(record(one, start, batches[:1]).steps[0][Quantity(NORM)])
    if not np.isfinite(norm) or not norm:
        raise UserError("gradient", f"its norm is {norm} on one device, so that nothing can be compared",
                        "prove a model that learns from these batches")
    if norm < 2 * clip:  # a limit that is not reached proves nothing
        subject = dataclasses.replace(subject, config=change(subject.config, {
            "optimizer.clip_norm": float(f"{norm / 2:.1g}")}))
        one = subject.build(Layout())
    return start, batches, measure(one, start, batches, seed), subject


def _drawn(trials: _Trials, meshes: int, seed: int, devices: int, report: Callable[[str], None],
           first: list[Layout]) -> tuple[list[Comparison], dict[str, str]]:
    """Return how layouts compare up to the first wrong one, and why others cannot run.

    Before those that are drawn come these `first` ones, and the config's own.
    """
    config, rng = trials.subject.config, random.Random(seed)
    how = dict(own=trials.subject.own, fixed_accumulation=bool(trials.subject.parts.get("with_key")))
    done: list[Comparison] = []
    refused: dict[str, str] = {}
    candidates = (*first, drawn_layouts.of_config(rng, config, devices, **how))
    for n in range(30 * meshes):
        layout = candidates[n] if n < len(candidates) else drawn_layouts.draw(rng, config, devices, **how)
        if f"{layout}" in refused or any(f"{one.layout}" == f"{layout}" for one in done):
            continue
        try:
            one = trials.run(layout)
        except Exception as error:
            if not trials.subject.own and not isinstance(error, UserError):
                raise
            # What a user shards by hand may be for some meshes only.
            kind = UserError if isinstance(error, UserError) else type(error)
            refused[f"{layout}"] = f"{kind.__name__}: {error}".splitlines()[0]
            continue
        finally:
            jax.clear_caches()
        done.append(one)
        report(f"{'WRONG' if one.finding else 'ok':<6}{one.worst:8.2g}  {one.seconds:4.1f} s  {layout}")
        if len(done) == meshes or one.finding:
            break
    if not done:
        raise UserError("meshes", f"none that was drawn can run; {[*refused.values()][-1]}", "change what it names")
    return done, refused


def _smallest(trials: _Trials, finding: Finding, report: Callable[[str], None]) -> Finding:
    """Return what is wrong on the smallest layout that shows it."""
    tries, left = 0, [*finding.layout.single(), *finding.layout.smaller()]
    while left and tries < _MOST_TRIES:
        layout = left.pop(0)
        tries += 1
        try:
            found = trials.run(layout, finding.step).finding
        except Exception:  # it cannot run there
            continue
        finally:
            jax.clear_caches()
        if found is not None:
            report(f"smaller: {layout}")
            finding, left = found, list(layout.smaller())
    return finding


def _certificate(code: str, about: str, name: str, reference: Reference, done: list[Comparison],
                 finding: Finding | None, more: JsonObject) -> JsonObject:
    return {
        "format": 1, "code": code, "config": about, "config_name": name, "proven": finding is None,
        "failure": f"{finding or ''}", **({} if finding is None else {"refuted": {
            "layout": f"{finding.layout}", "keys": dict(finding.layout.keys), "step": finding.step}}),
        "git_commit": git_commit(),
        "versions": {key: version_of(package) for key, package in runinfo.PACKAGES.items()} | {
            "python": platform.python_version()},
        "device_kind": jax.devices()[0].device_kind, "date": datetime.datetime.now(datetime.UTC).isoformat(
            timespec="seconds"),
        "float64": not reference.missing, "false_alarms": FALSE_ALARMS,
        "worst": _rounded(max(one.worst for one in done)),
        "layouts": [{"layout": f"{one.layout}", "worst": _rounded(one.worst), "where": one.where,
                     "seconds": round(one.seconds, 1)} for one in done],
    } | more


def _rounded(error: float) -> float:
    return float(f"{min(error, 1e300):.3g}")  # JSON has no infinity
