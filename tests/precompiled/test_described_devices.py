"""Programs for accelerators that are not here: compiled, serialized, and refused on this machine."""

import dataclasses
import importlib.util
import json

import jax
import numpy as np
import pytest

from jaxtrain import train
from jaxtrain.checkpoint import fingerprint
from jaxtrain.errors import UserError
from jaxtrain.plan import targets
from jaxtrain.precompiled import compiled_run, compiling
from tests.tiny import devices

COMPILERS = {"h100x2": "jax_cuda13_plugin", "v5ex4": "libtpu"}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "platform", "kind"), [("h100x2", "gpu", "NVIDIA H100 80GB HBM3"),
                                                          ("v5ex4", "tpu", "TPU v5 lite")])
def test_they_are_compiled_without_the_device(made, tmp_path, target, platform, kind):
    if importlib.util.find_spec(COMPILERS[target]) is None:
        pytest.skip("no compiler for it: it comes with the extras aot-cuda and aot-tpu")
    config = made().config
    train = dataclasses.replace(config.train, compiler_options={})  # those of the tests are for CPUs
    config = dataclasses.replace(config, train=train)
    compiling.compile_into(tmp_path, config, *compiling.devices_of(target))
    manifest = json.loads((tmp_path / "manifest").read_text().partition(" ")[2])
    assert (manifest["made_for"]["platform"], manifest["made_for"]["device_kind"]) == (platform, kind)
    assert [one["name"] for one in manifest["programs"]] == ["init", "step", "evaluation", "replica hashes",
                                                             "checkpoint sums"]
    from jaxtrain.builder import build

    with devices(1), pytest.raises(UserError, match=f"was compiled for the platform {platform}, and here it is cpu"):
        compiled_run.load(build(config), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="its XLA compiles for CPUs that are here only")
def test_programs_of_a_compiler_without_devices_run_and_have_the_same_bits(made, tmp_path, compilations, monkeypatch):
    """The way of programs for GPUs and TPUs, gone by programs for CPUs, which this machine can run."""
    from jaxlib import _jax

    config = made().config
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, data=2, fsdp=2, tensor=2))
    described = _jax.get_topology_for_devices(jax.devices())._make_compile_only_devices()
    assert type(described[0].client) is not type(jax.devices()[0].client)
    compiling.compile_into(tmp_path / "compiled", config, targets.here(), described)
    compilations.clear()
    ours = train(config, tmp_path / "ours", compiled=tmp_path / "compiled")
    assert set(compilations) <= {"jit(slice)"}  # of saves by Orbax
    monkeypatch.setattr(fingerprint, "_compiled", {})
    theirs = train(config, tmp_path / "theirs")
    assert "jit(step)" in compilations
    for our, their in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(our), np.asarray(their))


def test_a_config_file_sees_the_devices_that_it_is_compiled_for(tmp_path):
    (tmp_path / "asks.py").write_text(
        "import jax\nfrom ml_collections import ConfigDict\n\n\ndef get_config():\n"
        "    rows = 8 * jax.device_count() * len(jax.devices())\n"
        "    return ConfigDict({'train': {'steps': 3, 'unroll': -1 if jax.default_backend() == 'gpu' else 0},\n"
        "                       'data': {'source': 'stdlib', 'global_batch_size': rows}})\n")

    class Described:
        platform = "gpu"

    config = compiling.config_on([Described(), Described()], f"{tmp_path}/asks.py", {})
    assert (config.train.unroll, config.data.global_batch_size) == (-1, 32)
    assert jax.default_backend() == "cpu" and jax.device_count() == 8


def test_kernels_of_described_gpus_are_not_timed_but_may_have_been(monkeypatch):
    from jaxtrain.precompiled.programs import untimed

    class Described:
        platform, client = "gpu", None

    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    assert untimed([Described()]) == {"xla_gpu_autotune_level": "0"} and untimed(jax.devices()) == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_load_autotune_results_from=results.pbtxt")
    assert untimed([Described()]) == {}


def test_what_the_compiler_refuses_is_a_sentence():
    from jaxtrain.precompiled.programs import refused

    full = refused("step of 8 x 32", "RESOURCE_EXHAUSTED: Ran out of memory")
    assert "the compiler reports that step of 8 x 32 does not fit" in f"{full}"
    missing = "FAILED_PRECONDITION: Autotune results file does not exist: none.pbtxt"
    assert f"{refused('init', missing)}".startswith("XLA_FLAGS: XLA has no results of autotuning for init (")
    assert refused("init", "INTERNAL: a bug") is None


def test_a_target_that_is_not_known_is_refused():
    with pytest.raises(UserError, match="--target: 'h9000x8' is not known"):
        compiling.devices_of("h9000x8")


@pytest.mark.parametrize("name", ["", "cpu"])
def test_without_a_target_it_is_this_machine(name):
    target, here = compiling.devices_of(name)
    assert target.name == targets.here().name == "cpu" and here == jax.devices()
