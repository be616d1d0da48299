"""The uploads to trackers besides a run's lines; and refusals before anything is compiled."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.builder import build
from jaxtrain.config.load import load_config
from jaxtrain.config.sections.observe_keys import ObserveConfig
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.observe import events
from jaxtrain.observe.trackers import histograms
from jaxtrain.trainer import tracked
from tests.observe.trackers.test_histograms import plain
from tests.tiers import exhaustive, slow
from tests.tiny import devices, tiny_flags

pytestmark = pytest.mark.usefixtures("cache")
STEPS = 4
TINY = ["model.num_layers=1", "model.embed_dim=32", "data.seq_len=32", "data.global_batch_size=8",
        f"train.steps={STEPS}", "train.eval_every=2", "train.eval_batches=1", "train.progress=false",
        "checkpoint.every=2", "checkpoint.keep=9", "resilience.check_every=0"]
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


@pytest.mark.parametrize("mesh", exhaustive({}, {"mesh.data": 1, "mesh.fsdp": 2, "mesh.tensor": 2}))
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
    assert [event["step"] for event in events.events(tmp_path) if event["kind"] == "sample"] == [4]
    assert [text.count("\n") for _, name, text in seen.texts if name == "evaluations"] == [3]
    assert [(step, uri) for step, uri, _ in seen.artifacts] == [
        (step, (tmp_path / "checkpoints" / f"{step}").as_uri()) for step in (2, 4)]
    assert all(len(about["sha256"]) == 64 and about["loss"] > 0 for *_, about in seen.artifacts)
    assert [line["step"] for line in seen.lines] == [1, 2, 2, 3, 4, 4] and seen.ended == ["finished"]
    assert seen.run.name == tmp_path.name and seen.run.config["train"]["steps"] == STEPS and seen.run.run["git_commit"]


def config_on_one(words):
    return words | dict(one.split("=") for one in LOOKS) | {"mesh.data": 1}


@pytest.mark.parametrize(("ends", "status"), [
    *slow((KeyboardInterrupt, "stopped")), *exhaustive((RuntimeError, "failed"))])
@devices(2)
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
    (["observe.trackers=wandbb"], "observe.trackers: there is no tracker 'wandbb'; did you mean 'wandb'?\n"),
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


@pytest.mark.parametrize(("keys", "refused"), [
    ({"samples_every": 2}, "samples_every: batches given by data= have no tokenizer; leave it out"),
    ({"histograms": ["gradients"]}, "histograms: it is read with observe.histograms_every only"),
    ({"histograms_every": 2, "histograms": []}, "histograms: it is empty")])
def test_what_is_refused_of_a_run_whose_batches_are_given(keys, refused):
    """A run of the user's own model is such, and does not read train.sample_tokens either."""
    run = SimpleNamespace(config=SimpleNamespace(observe=ObserveConfig(**keys)), data=object())
    with pytest.raises(UserError, match=refused):
        tracked.check(run, SimpleNamespace(trackers=[Collector()]))


def test_histograms_are_waited_for_and_compiled_for_each_shape(two, monkeypatch):
    """Otherwise their time would be that of the next step, and a second shape would compile while others wait."""
    phases, counted = [], []

    @contextlib.contextmanager
    def phase(name):
        phases.append(name)
        yield
        assert name != "eval" or counted[-1].waited

    class Counted:
        waited = False

        def block_until_ready(self):
            self.waited = True

    monkeypatch.setattr(histograms, "prepare", lambda arrays, mesh: None)
    monkeypatch.setattr(histograms, "histograms", lambda arrays, mesh: counted.append(Counted()) or counted[-1])
    observe = ObserveConfig(histograms_every=2)
    run = SimpleNamespace(config=SimpleNamespace(observe=observe, resilience=two.config.resilience, to_dict=dict),
                          mesh=two.mesh, own=None)
    session = SimpleNamespace(phase=phase, trackers=[], workdir=Path("work"))
    looks = tracked.Tracked(run, session, None, {"run": "r1"})
    state = SimpleNamespace(params=None)
    assert [looks.look(step, state, {"tokens": np.ones(1 + step // 4)}) for step in range(1, 5)] == [
        False, True, False, True]
    assert phases == ["compile", "eval", "compile", "eval"]


def test_what_counts_gradients_is_compiled_in_its_phase(two):
    """Gradients may be laid out otherwise than the parameters, as those of the user's own model."""
    programs, before = [], len(histograms._programs)

    @contextlib.contextmanager
    def phase(name):
        yield
        programs.append((name, len(histograms._programs) - before))

    here, there = (jax.NamedSharding(two.mesh, jax.P(*axes)) for axes in ((), ("fsdp",)))
    state, gradients = (SimpleNamespace(params={"a": jax.device_put(np.ones(24, np.float32), place)})
                        for place in (here, there))
    sharded = SimpleNamespace(
        compiled_gradient=lambda batch: SimpleNamespace(output_shardings=(None, {"a": there})),
        value_and_grad=lambda state, batch: (None, gradients.params))
    observe = ObserveConfig(histograms_every=1, histograms=["weights", "gradients"])
    run = SimpleNamespace(config=SimpleNamespace(observe=observe, resilience=two.config.resilience, to_dict=dict),
                          mesh=two.mesh, own=None, sharded=sharded)
    session = SimpleNamespace(phase=phase, trackers=[], workdir=Path("work"))
    assert tracked.Tracked(run, session, None, {"run": "r1"}).look(1, state, {"tokens": np.ones(1)})
    assert programs == [("compile", 2), ("eval", 2)]


def test_trackers_have_their_time_at_the_end_of_a_run_that_failed(tmp_path):
    """The watchdog gives cleanup after an error resilience.hang_floor seconds, which may be less."""
    phases, run = [], SimpleNamespace(config=SimpleNamespace(observe=ObserveConfig(), to_dict=dict), own=None)

    class Ends(Collector):
        def finish(self, status):
            phases.append(status)

    @contextlib.contextmanager
    def phase(name):
        phases.append(name)
        yield
        phases.append("over")

    session = SimpleNamespace(watchdog=SimpleNamespace(phase=phase), trackers=[Ends()], workdir=tmp_path)
    checkpoints = SimpleNamespace(on_good=[])
    with pytest.raises(ZeroDivisionError), tracked.Tracked(run, session, checkpoints, {"run": "r1"}) as those:
        those.sink.start()
        raise ZeroDivisionError
    assert phases == ["trackers", "failed", "over"]
