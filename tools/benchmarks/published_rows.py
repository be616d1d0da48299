"""Runs that others have published, as jaxtrain configs of the same shapes, batch and layout.

Each file of docs/measurements/published/ is one source: its first line says what the source is, every other line is a
row, as `Row` has it. What a row does not say is assumed, and `assumed` says what. `machines.json` holds machines that
differ from the targets of jaxtrain/plan/targets.py, in the form of `jaxtrain plan --targets`.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jaxtrain.config.load import load_config
from jaxtrain.config.schema import AXES
from jaxtrain.plan import targets
from jaxtrain.plan.estimate import Estimate, estimate
from tools.benchmarks.published_models import MODELS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "measurements" / "published"
MACHINES = FOLDER / "machines.json"
UNITS = ("tokens", "TFLOP/s", "MFU", "seconds")
ASKED = ("model", "target", "devices", "seq_len", "global_batch", "micro_batch", "mesh", "precision", "remat",
         "schedule", "chunks", "more")


@dataclass(frozen=True)
class Row:
    """One published result. Batches count sequences; the mesh says only which axes have more than one device."""

    name: str
    system: str
    model: str  # of tools/benchmarks/published_models.py
    target: str  # of jaxtrain/plan/targets.py, or of machines.json
    devices: int  # a TPU7x chip is two
    seq_len: int
    global_batch: int
    mesh: Mapping[str, int]
    printed: float
    unit: str  # "tokens" a second and device, "TFLOP/s" or "MFU" with attention counted as full, "seconds" of a step
    release: str = ""  # version or date of what was measured
    micro_batch: int = 0  # sequences of one group of devices that a pass computes; 0: all of its part of the batch
    precision: str = "bfloat16"
    remat: str = "none"  # "a/b": halfway between two policies
    schedule: str = ""  # of pipeline stages
    chunks: int = 0  # of layers on each stage
    fitted: bool = False  # whether the constants of jaxtrain/plan/cost/rates.py were fitted to it
    like_fitted: bool = False  # whether they were fitted to another row that asks the same
    assumed: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)  # other keys of the config
    # Shares of the peak that their kernels reach, where these are not those of the rates: fitted to open rows.
    reached: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    address: str = ""
    where: str = ""  # in the source

    @property
    def question(self) -> str:
        """A short hash of what the planner is asked; rows of several releases may ask the same."""
        return self._hashed(ASKED + (("reached",) if self.reached else ()))

    def _hashed(self, keys: tuple[str, ...]) -> str:
        asked = {key: getattr(self, key) for key in keys}
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def half(self) -> str:
        """The half it belongs to: "fitted", or by its question's hash "open", for fits to come, or "held out"."""
        if self.fitted or self.like_fitted:
            return "fitted"
        return "held out" if int(self._hashed(ASKED), 16) % 2 else "open"  # whatever was fitted since

    @property
    def chip(self) -> str:
        """The name of its target in jaxtrain/plan/targets.py."""
        return chips().get(self.target, self.target)

    @property
    def machine(self) -> targets.Target:
        """Its target, named as the chip is."""
        machine = machines()[self.target]
        return dataclasses.replace(machine, name=self.chip, efficiency={**machine.efficiency, **self.reached})

    @property
    def tokens(self) -> float:
        """The tokens of a step for each device."""
        return self.global_batch * self.seq_len / self.devices

    def keys(self, remat: str) -> dict[str, Any]:
        """Return the keys of its config, besides those of the model's file."""
        sizes = {axis: self.mesh.get(axis, 1) for axis in AXES}
        groups = self.devices // (sizes["stage"] * sizes["context"] * sizes["tensor"])  # that have rows of their own
        passes = self.global_batch // (groups * self.micro_batch) if self.micro_batch else 1
        keys = {**{f"mesh.{axis}": size for axis, size in sizes.items()}, "data.seq_len": self.seq_len,
                "data.global_batch_size": self.global_batch, "train.precision": self.precision, "train.remat": remat,
                "train.loss_chunks": 1}  # most of them hold all logits
        if sizes["stage"] > 1:
            keys |= {"train.accumulation": 1, "pipeline.microbatches": passes,
                     "pipeline.schedule": self.schedule or "1f1b", "pipeline.chunks": self.chunks or 1}
        else:
            keys["train.accumulation"] = passes
        if self.machine.platform == "cuda":
            keys |= {"train.attention": "cudnn", "data.cross_document_attention": True}
        return keys | MODELS[self.model][1] | dict(self.more)

    def predict(self) -> list[Estimate]:
        """Return the estimate of this row; two where it lies halfway between two policies."""
        file, _, variant = MODELS[self.model][0].partition(":")
        path = f"{ROOT / 'configs' / file}.py{variant and f':{variant}'}"
        return [estimate(load_config(path, self.keys(remat)), self.machine, self.devices)
                for remat in self.remat.split("/")]

    def seconds(self, flops: float) -> float:
        """Return the seconds that its step took; `flops` of a token: the model's, attention counted as full."""
        if self.unit == "seconds":
            return self.printed
        if self.unit == "tokens":
            return self.tokens / self.printed
        rate = self.printed * (1e12 if self.unit == "TFLOP/s" else targets.TARGETS[self.chip].peak["bfloat16"])
        return self.tokens * flops / rate


@cache
def chips() -> dict[str, str]:
    """Return the chip of each machine of machines.json."""
    return {name: keys["like"] for name, keys in json.loads(MACHINES.read_text()).items()}


@cache
def machines() -> dict[str, targets.Target]:
    """Return all targets by name, those of machines.json among them."""
    return {**targets.TARGETS, **targets.read(MACHINES)}


def rows() -> list[Row]:
    """Return all rows, source by source."""
    found = [row for path in sorted(FOLDER.glob("*.jsonl")) for row in of_source(path)]
    fitted = {row.question for row in found if row.fitted}
    return [dataclasses.replace(row, like_fitted=row.question in fitted) for row in found]


def header(path: Path) -> dict[str, str]:
    """Return what the first line of a source says: its name and address, the system, and which state of it was read."""
    return json.loads(path.read_text().partition("\n")[0])


def of_source(path: Path) -> Iterator[Row]:
    """Yield the rows of one file."""
    first = header(path)
    for line in path.read_text().splitlines()[1:]:
        yield Row(**{**{key: first[key] for key in ("source", "address", "system")}, **json.loads(line)})


def problems(found: list[Row]) -> list[str]:
    """Return what is wrong with rows: names given twice, unknown words, meshes of another number of devices."""
    said, names = [], set[str]()
    for row in found:
        wrong = {"its name is given twice": row.name in names, "its model is unknown": row.model not in MODELS,
                 "its target is unknown": row.target not in machines(), "its unit is unknown": row.unit not in UNITS,
                 "its mesh has another number of devices": math.prod(row.mesh.values()) != row.devices,
                 "its figure is not positive": row.printed <= 0, "its source has no address": not row.address}
        said += [f"{row.name}: {what}" for what, is_so in wrong.items() if is_so]
        names.add(row.name)
    return said
