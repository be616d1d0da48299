"""Layouts are drawn from a config, and made smaller where one shows an error."""

import random

import jaxtrain as jt
from jaxtrain.proof import drawn_layouts
from jaxtrain.proof.drawn_layouts import Layout


def drawn(config, many=60, **how):
    rng = random.Random(0)
    return [drawn_layouts.draw(rng, config, 8, **{"own": False, "fixed_accumulation": False, **how})
            for _ in range(many)]


def test_draws_cover_every_axis_and_say_only_what_differs_from_one_device():
    config = jt.make_config({})
    found = drawn(config)
    assert {axis for layout in found for axis in layout.sizes} == {
        "data", "fsdp", "stage", "context", "expert", "tensor"}
    assert max(layout.devices for layout in found) == 8 and min(layout.devices for layout in found) == 2
    for layout in found:
        assert all(value != drawn_layouts.value_in(config, key) for key, value in layout.options.items()), layout
        assert ("pipeline.schedule" in layout.keys) <= ("stage" in layout.sizes)
    assert {"train.accumulation", "train.remat", "optimizer.zero_stage", "pipeline.schedule",
            "mesh.context_strategy"} <= {key for layout in found for key in layout.options}


def test_a_module_of_ones_own_is_given_the_keys_that_it_reads():
    found = drawn(jt.make_config({}), own=True, fixed_accumulation=True)
    assert {key for layout in found for key in layout.options} == {"optimizer.zero_stage"}
    assert not any("stage" in layout.sizes for layout in found)


def test_the_configs_own_layout_fits_the_devices():
    config = jt.make_config({"mesh": {"data": 1, "fsdp": 64, "tensor": 8}})
    own = drawn_layouts.of_config(random.Random(0), config, 8, own=False, fixed_accumulation=False)
    assert own.devices == 8 and own.sizes.keys() == {"fsdp", "tensor"}


def test_smaller_layouts_have_less():
    layout = Layout({"mesh.stage": 2, "mesh.tensor": 4, "train.accumulation": 4, "pipeline.schedule": "gpipe"})
    smaller = list(layout.smaller())
    assert all(layout.has(one) and f"{one}" != f"{layout}" for one in smaller)
    assert Layout({"mesh.tensor": 4, "train.accumulation": 4}) in smaller, "a schedule goes with its stages"
    assert Layout({"mesh.stage": 2, "mesh.tensor": 2, "train.accumulation": 4, "pipeline.schedule": "gpipe"}) in smaller
    assert not Layout({"mesh.tensor": 2}).has(layout)
