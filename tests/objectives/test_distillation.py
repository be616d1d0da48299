"""Distillation on any mesh: loss and gradients are those of a plain sum over all logits on one device."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.kernels.loss_head.cross_entropy import distillation_loss
from jaxtrain.observe.own_parts import difference
from jaxtrain.run import identity
from jaxtrain.tuning.teacher import distillation
from tests.numerics import reference
from tests.tiers import slow_if

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
SOFT, TEMPERATURE = 0.3, 2.0
TEACHER = dict(model__num_layers=3, model__embed_dim=64)
CASES = {
    "one device": {},
    "fsdp x tensor, ZeRO, accumulation": dict(mesh=(2, 2, 2), train__accumulation=2, train__loss_chunks=2,
                                              optimizer__zero_stage=3),
    "context, remat": dict(mesh=(1, 2, 1), mesh__context=2, train__remat="full"),
    "1f1b": dict(mesh=(1, 2, 2), mesh__stage=2),
    "zero-bubble": dict(mesh=(2, 1, 1), mesh__stage=2, pipeline__schedule="zb_v", train__z_loss=1e-3),
}


def logits(config, params, batch):
    x = reference.last_norm(config.model, params, reference.through(config.model, params, batch, []))
    return x @ params["output"]["kernel"] if "output" in params else x @ params["embed"]["table"].T


def plain(config, teacher_config, params, teacher, batch, z_loss):
    """The mean over tokens, from all logits at once."""
    student, of_teacher = logits(config, params, batch), logits(teacher_config, teacher, batch)
    p, q = (jax.nn.log_softmax(x / TEMPERATURE) for x in (of_teacher, student))
    divergence = (jnp.exp(p) * (p - q)).sum(-1)
    hard = -jnp.take_along_axis(jax.nn.log_softmax(student), batch["targets"][..., None], -1)[..., 0]
    hard += z_loss * jax.nn.logsumexp(student, -1) ** 2
    each = (1 - SOFT) * hard + SOFT * TEMPERATURE**2 * divergence
    return (batch["weights"] * each).sum() / batch["weights"].sum()


@functools.cache
def teacher():
    """Return a teacher's config, and parameters that predict something: a little noise on the initial ones."""
    config = reference.tiny("llama", **TEACHER)
    draw = np.random.default_rng(0)
    params = jax.device_get(jt.build(config, devices=jax.devices()[:1]).init().params)
    return config, jax.tree.map(lambda p: p + draw.normal(0, 0.1, p.shape).astype(np.float32), params)


def run_of(**keys):
    mesh = keys.pop("mesh", (1, 1, 1))
    config = reference.tiny("gpt2", **(dict(zip(("mesh__data", "mesh__fsdp", "mesh__tensor"), mesh, strict=True))
                                       | keys))
    devices = int(np.prod([getattr(config.mesh, axis) for axis in ("data", "fsdp", "stage", "context", "tensor")]))
    return jt.build(config, devices=jax.devices()[:devices],
                    objective=distillation(teacher()[0], soft=SOFT, temperature=TEMPERATURE))


@functools.cache
def truth(z_loss):
    params, (config, of_teacher) = reference.initial("gpt2"), teacher()
    grad = jax.jit(jax.value_and_grad(lambda p: plain(reference.tiny("gpt2"), config, p, of_teacher,
                                                      reference.batch(0), z_loss)))
    return jax.device_get(grad(params))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=slow_if(name not in ("one device", "1f1b", "context, remat")))
    for name in CASES])
def test_any_mesh_gives_the_plain_loss_and_gradients(name):
    run = run_of(**CASES[name])
    params, of_teacher = reference.initial("gpt2"), teacher()[1]
    state = reference.start_from(run, params | {"teacher": of_teacher})
    state, metrics = reference.compiled(run)(state, run.sharded.place(reference.batch(0)))
    loss, gradient = truth(run.config.train.z_loss)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    norm, o = float(metrics["grad_norm"]), run.config.optimizer
    got = jax.tree.map(lambda m: np.asarray(m) / (1 - o.b1) / min(1, o.clip_norm / norm), reference.moments(state))
    error, leaf = reference.worst(got, gradient, floor=1e-3 * norm)
    assert error < 1e-5, leaf
    assert jax.tree.all(jax.tree.map(np.array_equal, state.frozen["teacher"], of_teacher))


def test_logits_exist_for_one_chunk_only():
    x, y = jnp.ones((1, 4096, 8)), jnp.ones((1, 4096, 16))
    head, teacher_head = jnp.ones((8, 512)), jnp.ones((16, 512))
    step = jax.grad(lambda x: distillation_loss(x, head, jnp.zeros((1, 4096), int), jnp.ones((1, 4096)), y,
                                                teacher_head, soft=0.5, chunks=16)[0])
    assert "4096,512" not in str(jax.make_jaxpr(step)(x)) and "256,512" in str(jax.make_jaxpr(step)(x))


@pytest.mark.slow
def test_a_teacher_comes_from_its_workdir_and_evaluation_is_plain(teachers, tmp_path):
    workdir, config, student, trained = teachers
    run = on_two(student, objective=distillation(config, workdir=workdir))
    state = run.init()
    assert equal(state.frozen["teacher"], trained)
    alone = on_two(student)
    want = alone.evaluate(alone.init(), 1)
    assert run.evaluate(state, 1) == pytest.approx(want)
    end = jt.train(run, tmp_path / "student")
    assert equal(end.frozen["teacher"], trained)


@pytest.mark.parametrize(("keys", "match"), [
    (dict(soft=1.5), "share of the loss"), (dict(temperature=0), "above 0")])
def test_bad_numbers_are_refused(keys, match):
    with pytest.raises(jt.UserError, match=match):
        distillation(reference.tiny("llama"), **keys)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stages", [2, 4])
def test_a_teacher_with_experts_and_as_many_layers_as_stages_divide(stages):
    """The teacher's layers are never split over stages, and its routers compute in float32."""
    of_teacher = reference.tiny("deepseek_v3", model__num_layers=8, model__dense_layers=0, model__num_experts=4)
    make = distillation(of_teacher)
    losses = []
    for keys in (dict(mesh__data=1), dict(mesh__data=1, mesh__stage=stages)):
        config = reference.tiny("gpt2", model__num_layers=4, train__precision="float32", **keys)
        run = jt.build(config, devices=jax.devices()[:keys.get("mesh__stage", 1)], objective=make)
        params = reference.initial("gpt2", 4)
        of = jax.device_get(jax.jit(run.objective.init_frozen)(jax.random.key(7), {}))
        state = reference.start_from(run, params | of)
        losses.append(float(reference.compiled(run)(state, run.sharded.place(reference.batch(0)))[1]["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    half = jt.build(reference.tiny("gpt2", mesh__data=8, train__precision="bfloat16"), objective=make)
    cast = jax.eval_shape(half.cast, half.abstract.all_params)["teacher"]["blocks"]["layer"]["mlp"]
    assert cast["router"]["kernel"].dtype == "float32" and cast["gate"].dtype == "bfloat16"


def test_another_vocabulary_is_refused():
    with pytest.raises(jt.UserError, match=r"model\.vocab_size"):
        jt.build(reference.tiny("gpt2", mesh__data=8),
                 objective=distillation(reference.tiny("llama", model__vocab_size=128)))


@pytest.mark.slow
def test_a_workdir_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(jt.UserError, match="there is none in"):
        jt.build(reference.tiny("gpt2", mesh__data=8), objective=distillation(
            reference.tiny("llama"), workdir=tmp_path)).init()


def test_a_teacher_with_a_shorter_context_is_refused():
    teacher = reference.tiny("llama", model__max_seq_len=8, data__seq_len=8)
    with pytest.raises(jt.UserError, match=r"data\.seq_len: rows of 16 tokens exceed the teacher's"):
        jt.build(reference.tiny("gpt2", mesh__data=8), objective=distillation(teacher))


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """A workdir with the teacher after 2 and after 4 steps, its config, and the config of students."""
    folder = tmp_path_factory.mktemp("teachers")
    (folder / "text.txt").write_text("a line of text\n" * 200)
    keys = dict(train__steps=4, train__eval_batches=1, train__log_every=4, mesh__data=2, model__vocab_size=320,
                checkpoint__every=2, checkpoint__keep=9, data__source=str(folder / "text.txt"),
                data__cache_dir=str(folder / "cache"))
    config = reference.tiny("llama", **TEACHER, **keys)
    state = jt.train(on_two(config), folder / "teacher")
    return folder / "teacher", config, reference.tiny("gpt2", **keys), jax.device_get(state.params)


def on_two(config, **parts):
    return jt.build(config, devices=jax.devices()[:2], **parts)


def of_teacher(run, parts):
    return jax.device_get(run.init(parts=parts).frozen["teacher"])


def equal(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.mark.slow
def test_a_run_keeps_the_teacher_that_it_began_with(teachers, tmp_path):
    """The run is killed before its first checkpoint, and meanwhile the teacher trains on."""
    workdir, config, student, latest = teachers
    shutil.copytree(workdir / "checkpoints" / "2", tmp_path / "teacher/checkpoints/2")
    run = on_two(student, objective=distillation(config, workdir=tmp_path / "teacher"))
    parts = identity.own_parts(run, {})
    assert parts["objective"]["checkpoint"]["step"] == 2
    began = of_teacher(run, parts)
    shutil.copytree(workdir / "checkpoints" / "4", tmp_path / "teacher/checkpoints/4")
    assert identity.own_parts(run, {})["objective"]["checkpoint"]["step"] == 4  # a new run has the newest one
    assert identity.own_parts(run, parts) == parts and equal(of_teacher(run, parts), began)
    assert equal(of_teacher(run, identity.own_parts(run, {})), latest) and not equal(began, latest)
    moved = on_two(student, objective=distillation(config, workdir=workdir))
    assert identity.own_parts(moved, parts) == parts and equal(of_teacher(moved, parts), began)

    shutil.rmtree(tmp_path / "teacher/checkpoints/2")
    assert identity.own_parts(run, parts) == parts  # what the run has saved holds the teacher too
    with pytest.raises(jt.UserError, match="no longer has the checkpoint of step 2 that this run began with"):
        run.init(parts=parts)
    other = on_two(student, objective=distillation(
        config, workdir=shutil.copytree(tmp_path / "teacher", tmp_path / "other")))
    assert "with objective.checkpoint.workdir=" in difference(parts, identity.own_parts(other, parts))


@pytest.mark.slow
def test_only_a_checkpoint_that_was_found_good_teaches(teachers, tmp_path):
    workdir, config, student, _ = teachers
    shutil.copytree(workdir, tmp_path / "teacher")
    run = on_two(student, objective=distillation(config, workdir=tmp_path / "teacher"))
    (tmp_path / "teacher/checkpoints/4/good.json").unlink()
    assert identity.own_parts(run, {})["objective"]["checkpoint"]["step"] == 2
    (tmp_path / "teacher/checkpoints/2/good.json").write_text("{}")
    with pytest.raises(jt.UserError, match="none was read back and found good; start that run again"):
        run.init()


@pytest.mark.slow
def test_another_teacher_or_share_is_told(teachers):
    workdir, config, student, _ = teachers

    def parts(of=config, **settings):
        make = distillation(of, **(dict(workdir=workdir, soft=0.5) | settings))
        return identity.own_parts(on_two(student, objective=make), {})

    assert difference(parts(), parts()) == ""
    assert difference(parts(), parts(soft=0.7)) == "with objective.soft=0.5, this one has 0.7"
    assert difference(parts(), parts(temperature=2.0)) == "with objective.temperature=1.0, this one has 2.0"
    assert "objective.checkpoint=(workdir" in difference(parts(), parts(workdir=None))
    other = reference.tiny("llama", model__vocab_size=320, **(TEACHER | dict(model__num_layers=4)))
    assert "objective.teacher.num_layers=3, this one has 4" in difference(parts(), parts(other))
