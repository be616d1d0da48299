"""A pipeline, same numbers: losses, the first gradient and its norm are those of plain training on one device.

Whatever the schedule, the number of stages, micro-batches and layers, and whatever else the mesh does inside a stage.
"""

import itertools
import json
import random

import jax
import numpy as np
import pytest

from jaxtrain.run import shapes_of
from tests.numerics import reference
from tests.tiers import exhaustive, slow, slow_if

FEW = 3  # steps
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
# Backwards in the opposite order of forwards: no schedule that jaxtrain makes does so.
OWN = "F0,F1,F2,F3,,,B3,B2,B1,B0\n,F0,F1,F2,F3,B3,B2,B1,B0\n"
# The first layers are on the last stage, and B and W are apart on it.
TURNED = {"position": [[1], [0]], "stages": [
    ["", "F0", "B0", "F1", "B1", "W0", "W1"], ["F0", "F1", "", "B0", "", "B1+W0", "W1"]]}


def pipeline(schedule, **keys):
    return {"pipeline__schedule": schedule} | {key if "__" in key else f"pipeline__{key}": value
                                               for key, value in keys.items()}


# (data, fsdp, tensor), and everything else that a case is about; the more at once, the fewer programs to compile.
QUICK = {
    "gpipe": ("gpt2_untied", (2, 1, 1), pipeline("gpipe", microbatches=4, mesh__stage=2, model__num_layers=5)),
    "1f1b": ("gpt2", (1, 2, 1), pipeline(
        "1f1b", microbatches=4, overlap=True, mesh__stage=2, train__accumulation=2, model__num_layers=5)),
    "interleaved": ("gpt2", (1, 1, 2), pipeline(
        "interleaved", microbatches=8, mesh__stage=2, model__num_layers=5, train__remat="full", recompute=False)),
    "zb_h1": ("gpt2", (2, 2, 1), pipeline("zb_h1", microbatches=8, mesh__stage=2, optimizer__zero_stage=3,
                                          recompute=False)),
    "zb_v": ("gpt2", (1, 1, 2), pipeline("zb_v", mesh__stage=4, model__num_layers=5, train__unroll=0)),
}
SLOW = {
    "experts whose results are kept": ("mixtral", (1, 2, 1), pipeline(
        "1f1b", mesh__stage=2, recompute=False, train__remat="attention_and_dots")),
    "one micro-batch": ("gpt2", (1, 1, 1), pipeline("1f1b", microbatches=1, mesh__stage=2)),
    "one micro-batch, W apart": ("gpt2", (1, 1, 1), pipeline("zb_v", microbatches=1, mesh__stage=2)),
    "micro-batches of an odd number": ("gpt2", (1, 1, 2), pipeline(
        "1f1b", microbatches=3, mesh__stage=4, data__global_batch_size=24)),
    "micro-batches of an odd number, interleaved": ("gpt2", (2, 1, 1), pipeline(
        "interleaved", microbatches=7, mesh__stage=2, data__global_batch_size=28, overlap=True)),
    "fewer layers than stages": ("gpt2", (1, 2, 1), pipeline("zb_h1", mesh__stage=4)),
    "one layer": ("llama", (1, 1, 2), pipeline("1f1b", mesh__stage=2, model__num_layers=1)),
    "fewer layers than chunks": ("qwen3", (1, 1, 2), pipeline("zb_v", mesh__stage=4, model__num_layers=3)),
    "three chunks": ("gpt2", (1, 1, 2), pipeline("interleaved", chunks=3, mesh__stage=2, model__num_layers=5)),
    "gpipe with chunks": ("gpt2", (1, 2, 1), pipeline("gpipe", chunks=2, mesh__stage=2, model__num_layers=5)),
    "chunks of the loss": ("llama", (1, 2, 2), pipeline("zb_h1", mesh__stage=2, train__loss_chunks=4)),
    "z-loss": ("gpt2", (1, 2, 2), pipeline("1f1b", mesh__stage=2, train__z_loss=1e-2)),
    "eight stages": ("gpt2", (1, 1, 1), pipeline("1f1b", mesh__stage=8, model__num_layers=5)),
    "rules without tensor": ("gpt2", (2, 2, 1), pipeline("zb_v", mesh__stage=2, mesh__rules="data")),
}
REMAT = ("none", "full", "dots", "attention", "attention_and_dots")


def dealt():
    """Every schedule on every mesh; the other choices dealt out evenly, always alike."""
    meshes = [(2, (1, 1, 1)), (2, (4, 1, 1)), (2, (1, 4, 1)), (2, (1, 1, 4)), (2, (2, 1, 2)), (4, (2, 1, 1)),
              (4, (1, 2, 1))]
    every = list(itertools.product(SCHEDULES, meshes))
    deal, columns = random.Random(0), []
    for values in (tuple(reference.FAMILIES), (2, 5, 7), range(4), (1, 2), (0, 1), REMAT, (False, True), (False, True)):
        column = list(itertools.islice(itertools.cycle(values), len(every)))
        deal.shuffle(column)
        columns.append(column)
    names = ("model__num_layers", "optimizer__zero_stage", "train__accumulation", "train__unroll", "train__remat",
             "overlap", "recompute")
    return {f"{schedule} stage{stage}-{'-'.join(map(str, (*mesh, family, *choice)))}":
            (family, mesh, pipeline(schedule, mesh__stage=stage, **dict(zip(names, choice, strict=True))))
            for (schedule, (stage, mesh)), family, *choice in zip(every, *columns, strict=True)}


@pytest.mark.parametrize("case", [
    case if case == "1f1b" else pytest.param(case, marks=slow_if(case == "zb_v"))
    for case in QUICK])
def test_a_pipeline_gives_the_numbers_of_one_device(case):
    family, mesh, keys = QUICK[case]
    reference.check(reference.build(family, mesh, **keys), family, FEW)


EVERY = SLOW | dealt()
# Of what no other slow case has.
IN_SLOW = ("experts whose results are kept", "gpipe with chunks", "three chunks")


@pytest.mark.parametrize("case", [
    pytest.param(name, marks=slow_if(name in IN_SLOW)) for name in EVERY])
def test_a_pipeline_gives_the_numbers_of_one_device_everywhere(case):
    family, mesh, keys = EVERY[case]
    reference.check(reference.build(family, mesh, **keys), family, FEW)


@pytest.mark.exhaustive  # of the slow tier the first steps suffice
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_gives_the_losses_of_one_device_for_all_of_a_training(schedule):
    reference.check(reference.build("gpt2", (1, 2, 2), **pipeline(schedule, mesh__stage=2)))


@pytest.mark.slow
def test_a_table_of_ones_own_gives_the_numbers_of_one_device(tmp_path):
    table = tmp_path / "own.csv"
    table.write_text(OWN)
    keys = dict(mesh__stage=2, pipeline__table=str(table), pipeline__microbatches=4, model__num_layers=5)
    reference.check(reference.build("gpt2", (1, 2, 1), **keys), steps=FEW)


@pytest.mark.exhaustive
def test_a_table_may_place_stages_in_another_order(tmp_path):
    table = tmp_path / "turned.json"
    table.write_text(json.dumps(TURNED))
    run = reference.build("gpt2", **dict(mesh__stage=2, pipeline__table=str(table), pipeline__microbatches=2))
    reference.check(run, steps=FEW)


@pytest.mark.parametrize(("schedule", "precision", "tolerance"), [
    *exhaustive(("zb_v", "float16", 1e-2), ("1f1b", "bfloat16", 5e-2), ("1f1b", "float16", 1e-2),
                ("zb_v", "bfloat16", 5e-2))])
def test_low_precision_is_close(schedule, precision, tolerance):
    keys = pipeline(schedule, mesh__stage=2, model__num_layers=5, train__precision=precision)
    reference.check(reference.build("gpt2", (1, 2, 1), **keys), steps=FEW, tolerance=tolerance)


@pytest.mark.parametrize("case", [
    pytest.param(name, marks=slow_if(name == "zb_v"))
    for name in QUICK | SLOW])
def test_evaluation_gives_the_loss_of_one_device(case):
    family, mesh, keys = (QUICK | SLOW)[case]
    run = reference.build(family, mesh, **keys)
    params = reference.start(run, family).params
    batch = reference.batch(0, run.config.data.global_batch_size)
    total, weight = run.sharded.compiled_evaluation(shapes_of(run).abstract())(params, run.sharded.place(batch))
    want = reference.loss(run.config.model, reference.initial(family, run.config.model.num_layers), batch)
    assert float(weight) == pytest.approx(batch["weights"].sum()), "tokens were left out, or counted twice"
    assert float(total / weight) == pytest.approx(float(want), rel=reference.TOLERANCE)


@pytest.mark.parametrize(("schedule", "layers"), [
    *slow(("zb_v", 5)), *exhaustive(("1f1b", 2), ("interleaved", 7))])
def test_initial_values_do_not_depend_on_the_stages(schedule, layers):
    run = reference.build("gpt2", (1, 2, 2), **pipeline(schedule, mesh__stage=2, model__num_layers=layers))
    init = run._jitted_init(run.config.train.seed).params
    for (path, got), want in zip(jax.tree_util.tree_flatten_with_path(init)[0],
                                 jax.tree.leaves(reference.initial("gpt2", layers)), strict=True):
        assert np.array_equal(got, want), f"{jax.tree_util.keystr(path)} starts with other values"
