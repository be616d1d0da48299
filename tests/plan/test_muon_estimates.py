"""The cost of Muon in a plan: its products, what its matrices exchange, and its time over AdamW's in recorded steps."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxtrain.config.load import load_config
from jaxtrain.plan.estimate import estimate
from jaxtrain.plan.targets import TARGETS, parse
from jaxtrain.plan.trace import kernels, reader
from jaxtrain.plan.trace.layouts import carried
from jaxtrain.plan.trace.program import Value
from jaxtrain.run import shapes_of
from jaxtrain.train_step.optimizers import muon_exchange, newton_schulz
from tests.numerics import reference
from tests.tiers import exhaustive, slow

ROOT = Path(__file__).parents[2]
CASES = json.loads((ROOT / "docs/measurements/hlo.json").read_text())
SIZES = {"data": 2, "fsdp": 4}


def exchange(run, platform="cuda"):
    return muon_exchange.exchanged(run.config.optimizer, run.abstract, run.layout, platform)


def test_matrices_of_a_stack_go_to_whole_ones_and_back():
    """Two layers over eight devices: what each gets both ways is one matrix of each shape, padding or not."""
    run = reference.build("llama", (1, 8, 1), optimizer__name="muon")
    shapes = [(32, 64), (32, 32), (32, 48)]  # q and out (four matrices), k and v (four), gate, up and down (six)
    assert sorted(exchange(run)) == sorted(
        ("all-to-all", ("fsdp",), 2 * math.prod(shape)) for shape in shapes for _ in range(2))
    one_by_one = reference.build("llama", (1, 8, 1), optimizer__name="muon", optimizer__moment_dtype="bfloat16")
    assert sorted(exchange(one_by_one)) == sorted(exchange(run) * 2), "each layer by itself"
    assert sum(size for *_, size in exchange(run, "cpu")) == 2 * sum(size for *_, size in exchange(run)), "float32"


def test_what_is_split_over_devices_that_compute_alike_is_gathered():
    """Six matrices over data=2 x tensor=4, eight places; heads are split over tensor, and data holds copies at rest."""
    run = reference.build("llama", (2, 1, 4), optimizer__name="muon")
    kinds = {(kind, axes) for kind, axes, _ in exchange(run)}
    assert kinds == {("all-to-all", ("tensor",)), ("all-gather", ("data",))}


@pytest.mark.parametrize("keys", [*slow({"mesh__fsdp": 8}), *exhaustive({"mesh__fsdp": 8, "model__num_layers": 16})])
def test_the_exchange_is_that_of_the_compiled_program(keys):
    run = reference.build("llama", optimizer__name="muon", **keys)
    found = 0
    for line in reference.compiled(run).as_text().splitlines():
        if "optimizer" in line and (shapes := re.search(r"= \(?(.*?)\)? all-to-all\(", line)):
            found += sum(4 * math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", shapes[1]))
    assert found == sum(size for *_, size in exchange(run, "cpu"))


def test_a_device_computes_the_products_of_its_own_matrices():
    """Each of sixteen layers' seven matrices on one of eight devices, two rounds of each: nothing is computed twice."""
    with kernels.stand_ins():
        run = reference.build("llama", (1, 8, 1), optimizer__name="muon", model__num_layers=16)
        traced = run.sharded.trace(shapes_of(run).abstract())
    block = reader.read(traced.jaxpr, dict(run.mesh.shape), "cpu")
    flops = sum(op.flops * times for op, times in block.all() if op.scope == "optimizer")
    sides = [(32, 64)] * 2 + [(32, 32)] * 2 + [(32, 48)] * 3
    assert flops == sum(2 * newton_schulz.STEPS * (4 * r * r * c + 2 * r**3) for r, c in sides)


@pytest.mark.parametrize(("name", "params", "shape", "spec"), [
    ("transpose", {"permutation": (1, 0, 2)}, (8, 6, 4), (("fsdp",), (), ())),
    ("reshape", {}, (6, 32), ((), ("fsdp",))),
    ("reshape", {}, (2, 3, 8, 4), ((), (), ("fsdp",), ())),
    ("reshape", {}, (48, 4), (("fsdp",), ())),  # parts stay parts of this size, wherever they are
    ("pad", {}, (8, 8, 4), ((), ("fsdp",), ())),
    ("sharding_constraint", {"sharding": SimpleNamespace(spec=PartitionSpec("data", PartitionSpec.UNCONSTRAINED))},
     (6, 8, 4), (("data",), ("fsdp",), ())),  # what is left free stays as it is
])
def test_layouts_are_carried_on_where_the_compiler_lays_out_arrays(name, params, shape, spec):
    given = Value((6, 8, 4), np.dtype("float32"), ((), ("fsdp",), ()), 4 * 6 * 8)
    assert carried(name, params, given, shape, SIZES) == spec


def time_over_adamw(case):
    target, devices = parse(case["target"])
    made = [estimate(load_config(ROOT / "configs" / case["config"], case["overrides"] | {"optimizer.name": name}),
                     target, devices).seconds for name in ("muon", "adamw")]
    return 1e3 * (made[0] - made[1])


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the steps were recorded with JAX 0.12")
@pytest.mark.parametrize(("muon", "adamw", "within"), [
    *slow(("8b_2_layers_muon_h100x8", "8b_2_layers_h100x8", 0.05)),
    *exhaustive(("124m_2_layers_muon_h100x1", "124m_2_layers_h100x1", 0.1), ("8b_muon_h100x8", "8b_h100x8", 0.05))])
def test_the_time_over_adamw_is_the_recorded_one(muon, adamw, within, monkeypatch):
    recorded = CASES[muon]["reached"]["step_ms"] - CASES[adamw]["reached"]["step_ms"]
    assert time_over_adamw(CASES[muon]) == pytest.approx(recorded, rel=within)
    if parse(CASES[muon]["target"])[1] > 1:
        monkeypatch.setattr(muon_exchange, "exchanged", lambda *_: [])
        assert time_over_adamw(CASES[muon]) != pytest.approx(recorded, rel=within), "its price is not seen"


def test_an_optimizer_without_an_exchange_has_none():
    config = reference.tiny("llama", mesh__fsdp=8, optimizer__name="adamw")
    assert not [kind for kind, _ in estimate(config, TARGETS["h100"], 8).talked if kind == "all-to-all"]


def test_a_barrier_of_no_arrays_is_read():
    def step(x):
        jax.lax.optimization_barrier(())  # as around the matrices of a part that has none
        return x

    assert [op.outputs for op in reader.read(jax.make_jaxpr(step)(1.0), {}, "cuda").ops] == [[]]
