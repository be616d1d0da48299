"""What trackers get of a run besides its lines; and what is refused before anything is compiled."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.builder import build
from jaxtrain.config.load import load_config
from jaxtrain.main import main
from tests.observe.trackers.test_histograms import plain
from tests.tiny import tiny_flags

pytestmark = pytest.mark.usefixtures("cache")
STEPS = 4
TINY = ["model.num_layers=2", "model.embed_dim=32", "data.seq_len=32", "data.global_batch_size=8",
        f"train.steps={STEPS}", "train.eval_every=2", "train.eval_batches=1", "train.progress=false",
        "checkpoint.every=2", "checkpoint.keep=9"]
LOOKS = ["observe.histograms_every=2", "observe.histograms=weights,gradients", "observe.samples_every=4",
         "train.sample_tokens=6"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return tiny_flags(tmp_path_factory, TINY)


class Collector(jt.Tracker):
    def __init__(self):
        self.lines, self.histograms, self.texts, self.artifacts, self.ended = [], {}, [], [], []

    def begin(self, run, since):
        self.run = run

    def log(self, lines):
        self.lines += lines

    def histogram(self, step, name, counts, edges):
        self.histograms[step, name] = counts, edges

    def text(self, step, name, text):
        self.texts.append((step, name, text))

    def artifact(self, step, uri, about):
        self.artifacts.append((step, uri, about))

    def finish(self, status):
        self.ended.append(status)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"mesh.data": 1, "mesh.fsdp": 2, "mesh.tensor": 2}])
def test_histograms_samples_and_checkpoints(flags, tmp_path, mesh):
    """Counts are those of NumPy over the whole arrays, on one device and split over four."""
    words = dict(flag.removeprefix("--config.").split("=", 1) for flag in flags[1:])
    config = load_config(flags[0].partition("=")[2], words | dict(one.split("=") for one in LOOKS) | mesh)
    config = config if mesh else load_config(flags[0].partition("=")[2], config_on_one(words))
    run = build(config, devices=jax.devices()[:4 if mesh else 1])
    seen = Collector()
    batches = {}

    class Batches(jt.Observer):
        def on_batch(self, step, batch):
            batches[step] = batch

    state = jt.train(run, tmp_path, observers=[seen, Batches()])
    gradient = run.sharded.value_and_grad(state, batches[STEPS])[1]
    for kind, tree in (("weights", state.params), ("gradients", gradient)):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        for path, leaf in leaves:
            name = f"{kind}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
            counts, edges = seen.histograms[STEPS, name]
            expected, bounds = plain(jax.device_get(leaf))
            np.testing.assert_array_equal(counts, expected, err_msg=name)
            np.testing.assert_allclose(edges, bounds, rtol=1e-5, atol=1e-9)
    assert {step for step, _ in seen.histograms} == {2, 4}
    assert [(step, len(text) > 0) for step, name, text in seen.texts if name == "sample"] == [(4, True)]
    assert [text.count("\n") for _, name, text in seen.texts if name == "evaluations"] == [3]
    assert [(step, uri) for step, uri, _ in seen.artifacts] == [
        (step, (tmp_path / "checkpoints" / f"{step}").as_uri()) for step in (2, 4)]
    assert all(len(about["sha256"]) == 64 and about["loss"] > 0 for *_, about in seen.artifacts)
    assert [line["step"] for line in seen.lines] == [1, 2, 2, 3, 4, 4] and seen.ended == ["finished"]
    assert seen.run.name == tmp_path.name and seen.run.config["train"]["steps"] == STEPS and seen.run.run["git_commit"]


def config_on_one(words):
    return words | dict(one.split("=") for one in LOOKS) | {"mesh.data": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("ends", "status"), [(KeyboardInterrupt, "stopped"), (RuntimeError, "failed")])
def test_how_a_run_ends(flags, tmp_path, ends, status):
    class Ender(jt.Observer):
        def on_batch(self, step, batch):
            if step == 2:
                raise ends

    words = dict(flag.removeprefix("--config.").split("=", 1) for flag in flags[1:])
    seen = Collector()
    with pytest.raises(ends):
        jt.train(load_config(flags[0].partition("=")[2], words), tmp_path, observers=[seen, Ender()])
    assert seen.ended == [status] and [line["step"] for line in seen.lines] == [1]


@pytest.mark.parametrize(("keys", "refused"), [
    (["observe.trackers=wandbb"], "observe.trackers: 'wandbb' is not supported; did you mean 'wandb'?\n"),
    (["observe.trackers=wandb,wandb"], "observe.trackers: it names a tracker twice; name each once\n"),
    (["observe.histograms=weight"], "observe.histograms: 'weight' is not supported; did you mean 'weights'?\n"),
    (["observe.histograms_every=2"], "observe.histograms_every: there is no tracker to show them; name one in "
     "observe.trackers, or leave it out\n"),
    (["observe.samples_every=2", "observe.trackers=tensorboard"], "observe.samples_every: train.sample_tokens is 0; "
     "give the length of a sample there\n"),
    (["observe.project="], "observe.project: it is empty; give a name, such as jaxtrain\n")])
def test_what_is_refused(flags, tmp_path, capsys, keys, refused):
    assert main([*flags, *(f"--config.{key}" for key in keys), f"--workdir={tmp_path}"]) == 2
    assert capsys.readouterr().err.endswith(refused)
