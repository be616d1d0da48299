"""The examples run as they stand: the script as a reader would start it, the notebook cell by cell."""

import importlib.util
import itertools
import os
import re
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.tiny import QUICKLY
from tools.release.run_notebooks import drop_scripts

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {path.stem: path for path in (ROOT / "examples").glob("*.ipynb")}
NOTEBOOK = NOTEBOOKS["mesh_shapes"]


class ThisInterpreter(KernelSpecManager):
    """The kernel is the Python that runs the tests, whatever kernels are installed and under whatever name."""

    def get_kernel_spec(self, kernel_name):
        return KernelSpec(**get_kernel_dict())


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICKLY}


def execute(notebook, folder: Path, tmp_path: Path) -> str:
    """Run all cells in a fresh kernel; what they printed."""
    manager = AsyncKernelManager(kernel_spec_manager=ThisInterpreter(), connection_file=str(tmp_path / "kernel.json"))
    client = NotebookClient(notebook, km=manager, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment(), cleanup_kc=True)
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


@pytest.fixture
def printed_by(forked):
    """A function that returns what a script prints, without a warning."""
    def run(script: str, *flags: str) -> str:
        done = forked([f"examples/{script}", *flags], ROOT, environment(), timeout=300)
        assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_script(printed_by):
    printed = printed_by("embed_train_step.py")
    assert printed.count("equal within 1e-5") == 2  # the module and the pytree
    assert "mesh: data=2 x fsdp=2 x tensor=2" in printed


@pytest.mark.exhaustive
def test_melodies_are_transcribed(printed_by):
    printed = printed_by("audio_notes.py")
    losses = [float(loss) for loss in re.findall(r"loss a note +([\d.]+)", printed)]
    right, all_ = map(int, re.search(r"without a mistake: (\d+) of (\d+)", printed).groups())
    assert losses[-1] < 0.05 * losses[0] and all_ > 10 and right >= 0.8 * all_
    assert re.search(r"batches of \(rows, frames\): \[(\(\d+, \d+\)(, )?){3}\]", printed)


@pytest.mark.slow
def test_what_users_do_next_is_predicted(printed_by):
    said = re.search(r"nats an event: ([\d.]+); by how common items are: ([\d.]+)", printed_by("event_streams.py"))
    loss, by_frequency = map(float, said.groups())
    assert loss < by_frequency - 0.4


@pytest.mark.slow
def test_spoken_words_are_prepared_trained_on_and_transcribed(printed_by):
    """So few steps learn little: docs/speech.md has what all of them reach."""
    printed = printed_by("spoken_words.py", "--clips=60", "--steps=4", "--stream")
    assert "60 of 60 texts are the same by --stream: word error rate" in printed
    assert re.search(r"^\d\d clips to learn from, \d+ to evaluate", printed)
    assert printed.count("heard ") == 5
    assert int(re.search(r"word error rate [\d.]+% of (\d+) words", printed)[1]) > 100


@pytest.mark.exhaustive  # minutes
def test_images_are_captioned(printed_by):
    printed = printed_by("images.py")
    assert int(re.search(r"zero-shot accuracy: (\d+)%", printed)[1]) > 50
    assert int(re.search(r"unseen images that are right: (\d+)%", printed)[1]) > 50


@pytest.mark.slow
def test_models_of_ones_own_are_trained(printed_by):
    recognised = re.search(r"(\d+)% of unseen images", printed_by("own_module.py"))
    assert int(recognised[1]) > 90
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed_by("own_pytree.py"))]
    assert len(losses) == 6 and losses[-1] < 0.02  # the noise alone is 0.01
    assert float(re.search(r"loss on unseen digits ([\d.]+)", printed_by("own_linen.py"))[1]) < 0.2


@pytest.mark.parametrize("script", ["own_module.py", "own_pytree.py", "own_linen.py"])
def test_models_of_ones_own_are_short(script):
    assert len((ROOT / "examples" / script).read_text().splitlines()) < 60


def kinds(cell) -> list:
    """Return what a cell shows: images as such, and text without its fractions, which differ between versions of JAX.

    A kernel may send in several pieces what is printed without a pause.
    """
    for output in cell.get("outputs", []):
        drop_scripts(output.get("data", {}))
    outputs = [sorted(output.data) if "data" in output else re.sub(r"\.\d+", "", output.get("text", ""))
               for output in cell.get("outputs", [])]
    return [shown for text, group in itertools.groupby(outputs, lambda output: isinstance(output, str))
            for shown in (["".join(group)] if text else group)]


@pytest.mark.slow
@pytest.mark.parametrize("name, said", [
    ("mesh_shapes", "mesh: fsdp=2048"), ("embed_step", "60 steps; accuracy"), ("text_to_model", "eval_loss"),
    ("finetune_published", "most answers have the form: True - and most sums are right: True")])
def test_notebook(name, said, tmp_path):
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    shipped = [kinds(cell) for cell in notebook.cells]
    printed = execute(notebook, ROOT / "examples", tmp_path)
    assert [kinds(cell) for cell in notebook.cells] == shipped, (
        f"its outputs are not those of these cells: python tools/release/run_notebooks.py {name}")
    assert said in printed


def test_every_notebook_is_executed():
    assert NOTEBOOKS.keys() == {"mesh_shapes", "embed_step", "text_to_model", "finetune_published"}


def test_the_first_cell_of_every_notebook_installs_only_where_jaxtrain_is_missing(monkeypatch):
    """A hosted runtime has neither jaxtrain nor its configs; elsewhere the cell does nothing."""
    first = {next(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
             for path in NOTEBOOKS.values()}
    assert len(first) == 1, "one cell for all"
    lines = first.pop().splitlines()
    (pip,) = [line.strip() for line in lines if line.strip().startswith("%pip")]
    cell = "\n".join(lines).replace(pip, "installed.append(SOURCE)")
    extras = re.search(r"jaxtrain\[(.*)\] @ \{SOURCE\}", pip)[1].split(",")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= known.keys()
    installed = []
    exec(cell, {"installed": installed})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AssertionError, match="set SOURCE in this cell"):
        exec(cell, {"installed": installed})
    exec(cell.replace('SOURCE = ""', 'SOURCE = "jaxtrain.whl"'), {"installed": installed})
    assert installed == ["jaxtrain.whl"]


@pytest.mark.exhaustive  # the notebooks of the slow tier are run in examples/, too
@pytest.mark.parametrize("folder", [".", "examples"])
def test_notebook_finds_the_configs(folder, tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    notebook.cells = [code[1], nbformat.v4.new_code_cell("import sys; print(configs, sys.executable)")]
    assert execute(notebook, ROOT / folder, tmp_path).split() == [str(ROOT / "configs"), sys.executable]


@pytest.mark.parametrize("name, images", [
    ("mesh_shapes", 7), ("embed_step", 2), ("text_to_model", 1), ("finetune_published", 0)])
def test_notebook_is_shipped_with_its_images(name, images):
    """It comes from one run from top to bottom, without warnings, and is small enough for a diff."""
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run all cells in a new kernel"
    outputs = [output for cell in code for output in cell.outputs]
    assert sum(bool({"image/png", "text/html"} & {*output.get("data", {})}) for output in outputs) == images
    assert all("data" in output or output.get("name") == "stdout" for output in outputs)
    assert all(len(output.get("data", {}).get("text/plain", "")) < 5000 for output in outputs)
    text = NOTEBOOKS[name].read_text()
    assert len(text) < 150_000 and "/home/" not in text and "/tmp/" not in text
    assert notebook.metadata.kernelspec.name == "python3"
