"""The drawings in a notebook: the device of each part of an array, meshes, schedules, runs and plans."""

import re
from pathlib import Path
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.sharding import drawings
from tools.release.draw_pictures import IMAGES, draw_mesh


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, ("fsdp", "tensor")), P(("tensor", "data"), "fsdp"),
                                  P("tensor", "fsdp", "data"), P(None, None, ("data", "tensor"))])
def test_parts_on_an_abstract_mesh_are_those_of_jax(spec):
    """Devices that are not there hold what JAX says that devices at the same places hold."""
    real = jt.make_mesh(data=2, fsdp=2, tensor=2)
    shape, there = (8, 16, 4), {device.id: place for place, device in enumerate(real.devices.flat)}
    held = [drawings._held(jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec)))
            for mesh in (jt.make_mesh(data=2, fsdp=2, tensor=2, devices=8), real)]
    assert held[0] == {part: sorted(there[device] for device in devices) for part, devices in held[1].items()}


def test_an_array_is_drawn_with_its_parts_bytes_and_copies():
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2, devices=8)
    kernel = jax.ShapeDtypeStruct((3, 64, 256), np.float32, sharding=NamedSharding(mesh, P(None, "fsdp", "tensor")))
    shown = jt.show(kernel, ("layers", "embed", "<mlp>"))
    assert f"{shown}".splitlines() == [
        "float32[3, 64, 256], 196,608 bytes; 49,152 bytes a device in 4 parts; 2 copies of each; embed over fsdp; "
        "<mlp> over tensor", "[0:3, 0:32, 0:128] on 0, 4", "[0:3, 0:32, 128:256] on 1, 5",
        "[0:3, 32:64, 0:128] on 2, 6", "[0:3, 32:64, 128:256] on 3, 7"]
    html = shown._repr_html_()
    assert html.count("<td style") == 4 and "&lt;mlp&gt; 128:256" in html and "<mlp>" not in html
    assert ">2, 6<small>49,152 B</small>" in html and "@scope (.jaxtrain)" in html
    assert "dimension 2 over tensor" in f"{jt.show(kernel)}"
    whole = jt.show(jax.device_put(np.zeros(4), SingleDeviceSharding(jax.devices()[3])))
    assert f"{whole}" == "float32[4], 16 bytes; whole on every device\n[0:4] on 3"


@pytest.mark.parametrize("sizes, grids, cells, more", [
    ({}, 1, 1, 0), ({"fsdp": 8}, 1, 8, 0), ({"fsdp": 2048}, 1, 512, 1536), ({"data": 3, "tensor": 2}, 1, 6, 0),
    ({"data": 2, "fsdp": 2, "tensor": 2}, 2, 8, 0), ({"data": 16, "fsdp": 64, "tensor": 8}, 1, 512, 7680),
    ({"fsdp": 64, "tensor": 16}, 1, 512, 512), ({"data": 2, "fsdp": 2, "tensor": 1024}, 1, 512, 3584)])
def test_a_mesh_is_drawn_as_far_as_there_is_room(sizes, grids, cells, more):
    count = int(np.prod([*sizes.values()]))
    html = jt.show(jt.make_mesh(**sizes, devices=count))._repr_html_()
    assert (html.count("<table"), html.count("<td style")) == (grids, cells)
    assert (f"and {more:,} more" in html) == bool(more)


def test_a_run_and_its_schedule_show_themselves():
    config = jt.load_config("configs/gpt.py:tiny", {"mesh.stage": 2, "mesh.fsdp": 2, "train.accumulation": 4})
    run = jt.build(config, devices=4)
    html = run._repr_html_()
    assert "blocks/layer/mlp/up/kernel" in html and "whole state" in html and " ticks, " in html
    schedule = jt.show(run.schedules[0])
    assert "<svg" in schedule._repr_html_() and f"{schedule}".startswith("stage 0  F0")
    with pytest.raises(jt.UserError, match=r"what: int cannot be drawn; give a mesh"):
        jt.show(3)


def _texts(svg):
    """Return what an SVG says, and where its cells and its edges are."""
    tree = ElementTree.fromstring(svg)
    boxes = [[float(one.get(key, 0)) for key in ("x", "y", "width", "height")] for one in tree.iter()
             if one.tag.endswith("rect")]
    return [one.text for one in tree.iter() if one.tag.endswith("text")], boxes


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 40}, {"data": 4, "fsdp": 2, "tensor": 3}, {"fsdp": 2, "tensor": 1024}])
def test_a_drawing_is_saved_with_the_cells_of_the_notebook(tmp_path, sizes):
    drawing = jt.show(jt.make_mesh(**sizes, devices=int(np.prod([*sizes.values()]))))
    drawing.save(tmp_path / "mesh.svg")
    said, (surface, *cells) = _texts((tmp_path / "mesh.svg").read_text())
    html = drawing._repr_html_()
    assert len(cells) == html.count("<td style") and [one for one in said if one in html] == said
    places = {(x, y) for x, y, *_ in cells}
    assert len(places) == len(cells) and all(x + w <= surface[2] and y + h <= surface[3] for x, y, w, h in cells)
    with pytest.raises(jt.UserError, match=r"path: mesh.png is not the name of an SVG file; give one that ends"):
        drawing.save(tmp_path / "mesh.png")


def test_what_arrays_are_called_is_escaped_in_a_file(tmp_path):
    mesh = jt.make_mesh(fsdp=2, devices=2)
    array = jax.ShapeDtypeStruct((4,), np.float32, sharding=NamedSharding(mesh, P("fsdp")))
    jt.show(array, ("<a&b>",)).save(tmp_path / "array.svg")
    said, cells = _texts((tmp_path / "array.svg").read_text())
    assert "<a&b> 0:2" in said and "8 B" in said and len(cells) == 3


def test_a_schedule_is_saved_as_it_is_drawn(tmp_path):
    schedule, *_ = jt.build(jt.load_config("configs/gpt.py:tiny", {"mesh.stage": 2, "train.accumulation": 4}),
                            devices=2).schedules
    jt.show(schedule).save(tmp_path / "schedule.svg")
    assert "F0" in _texts((tmp_path / "schedule.svg").read_text())[0]


def test_the_mesh_of_the_readme_is_what_is_drawn_today(tmp_path):
    draw_mesh(tmp_path / "mesh.svg")
    assert (tmp_path / "mesh.svg").read_text() == (IMAGES / "mesh.svg").read_text(), (
        "python tools/release/draw_pictures.py mesh")


def test_pictures_are_small_and_shown_somewhere():
    root = Path(__file__).parents[2]
    shown = {name for page in (root / "README.md", *root.glob("docs/**/*.md"))
             for name in re.findall(r"images/([\w-]+\.(?:svg|png))", page.read_text())}
    assert {path.name for path in IMAGES.iterdir()} == shown
    assert all(path.stat().st_size < 150_000 for path in IMAGES.iterdir())
