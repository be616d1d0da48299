"""The options that a step is compiled with: the preset of its platform, changed by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.train_step.compiler_options import PRESETS, compiled, compiler_options
from tests.numerics import reference

TERMINATION = "xla_gpu_nccl_termination_timeout_seconds"


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str
    process_index: int
    id: int


def test_a_preset_is_changed_by_name():
    assert compiler_options("cpu", {}) == {}
    preset = compiler_options("cuda", {})
    assert preset == PRESETS["gpu"]
    assert compiler_options("cuda:9", {}, tensor=2).keys() == preset.keys() - {"xla_gpu_enable_triton_gemm"}
    assert compiler_options("cuda", {}, tensor=2, fp8=True) == {**preset, "xla_gpu_dot_merger_threshold_mb": "0"}
    repeatable = {"xla_gpu_exclude_nondeterministic_ops": True}
    assert compiler_options("cuda:9", {}, deterministic=True) == preset | repeatable
    assert compiler_options("cuda", {}, hang_limit=3659.5) == preset | {TERMINATION: "3660"}
    assert compiler_options("cpu", {}, fp8=True, deterministic=True, hang_limit=9) == {}
    changed = compiler_options("gpu", {
        "xla_disable_hlo_passes": "", "xla_gpu_enable_triton_gemm": "true", "xla_x": "7"})
    assert changed == {name: value for name, value in preset.items() if name != "xla_disable_hlo_passes"} | {
        "xla_gpu_enable_triton_gemm": True, "xla_x": "7"}


@pytest.mark.parametrize("platform", PRESETS)
def test_this_jax_takes_every_preset(platform):
    """XLA knows the options of all platforms on each of them."""
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(()))
    options = compiler_options(platform, {}, fp8=True, deterministic=True, hang_limit=60)
    assert compiled(lowered, options)(jnp.ones(())) == 2


@pytest.mark.parametrize("key", [{"train__deterministic": True}, {"resilience__replay_every": 10}])
def test_a_step_that_is_repeated_is_compiled_to_give_the_same_bits(key):
    run = jt.build(reference.tiny("gpt2", mesh__data=8, **key), devices=8, platform="gpu")
    assert run.sharded.compiler_options["xla_gpu_exclude_nondeterministic_ops"] is True


@pytest.mark.parametrize(("keys", "processes", "seconds"), [
    ({}, 2, "3660"), ({}, 1, None), ({"resilience__hang_factor": 0.0}, 2, None),
    ({"resilience__start_limit": 90.0, "resilience__hang_floor": 100.0}, 2, "160")])
def test_gpus_of_several_processes_wait_little_longer_than_the_watchdog(keys, processes, seconds):
    sharded = jt.build(reference.tiny("gpt2", mesh__data=2, **keys), devices=2, platform="gpu").sharded
    devices = np.array([Device("gpu", i % processes, i) for i in range(2)])
    mesh = jax.sharding.Mesh(devices.reshape(tuple(sharded.mesh.shape.values())), sharded.mesh.axis_names)
    there = dataclasses.replace(sharded, layout=dataclasses.replace(sharded.layout, mesh=mesh))
    assert there.compiler_options.get(TERMINATION) == seconds


@pytest.mark.parametrize(("name", "value"), [("xla_no_such_option", True), ("xla_gpu_enable_triton_gemm", "perhaps")])
def test_what_the_compiler_does_not_take_is_told_in_a_sentence(name, value):
    run = jt.build(reference.tiny("gpt2", mesh__data=8, train__compiler_options={name: value}))
    with pytest.raises(jt.UserError, match=rf"^train.compiler_options: XLA of JAX .* does not take it \(.*{name}"):
        run.sharded.compiled(reference.batch(0))


def test_options_reach_the_compiler_from_the_command_line_and_from_python(monkeypatch):
    seen = []
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda _, compiler_options=None: seen.append(compiler_options))
    config = jt.make_config(reference.tiny("gpt2", mesh__data=8).to_dict(), {
        "train.compiler_options.xla_disable_hlo_passes": "dce",
        "train.compiler_options.xla_gpu_enable_triton_gemm": False})
    options = {"xla_gpu_enable_triton_gemm": False, "xla_disable_hlo_passes": "dce"}
    assert config.train.compiler_options == options
    jt.build(config).sharded.compiled(reference.batch(0))
    step = jt.make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), mesh=jt.make_mesh(data=8),
                              compiler_options=options)
    step.init(jnp.ones(()))
    step.compiled(jnp.ones(8))
    assert seen == [options, options]
