"""The calls of the compiler for devices that are not here, and the reading of its figures."""

import math
import types

import pytest
from jax.experimental import topologies

from jaxtrain.errors import UserError
from jaxtrain.plan import targets
from jaxtrain.plan.compiler import _torus, capability, devices_of, memory_of


@pytest.mark.parametrize(("described", "can"), [("cuda:9", [True, True, False]), ("cuda:8", [True, False, False])])
def test_the_described_gpu_says_what_cudnn_can_do(described, can):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    before = cudnn.check_compute_capability
    with capability(described):
        assert [cudnn.check_compute_capability(needed) for needed in ("8.0", "9.0", "10.0")] == can
    assert cudnn.check_compute_capability is before


@pytest.mark.parametrize(("on_hosts", "peak"), [(0, 70), (60, 54)])
def test_what_layers_keep_on_hosts_is_not_memory_of_the_device(on_hosts, peak):
    """The compiler's peak then counts both together."""
    memory = types.SimpleNamespace(argument_size_in_bytes=12, temp_size_in_bytes=42, peak_memory_in_bytes=70,
                                   host_temp_size_in_bytes=on_hosts)
    run = types.SimpleNamespace(abstract=(), sharded=types.SimpleNamespace(
        settings=types.SimpleNamespace(platform="cuda:9")))
    compiled = types.SimpleNamespace(memory_analysis=lambda: memory)
    assert memory_of(compiled, run) == (peak, 54)


@pytest.mark.parametrize(("target", "sides"), [("v5px8", "2x2x2"), ("v6ex8", "2x4"), ("tpu7xx8", "1x2x2")])
def test_a_slice_has_chips_and_a_chip_may_have_two_devices(target, sides):
    assert _torus(*targets.parse(target)) == sides


def test_a_slice_that_there_is_not_is_refused_with_those_next_to_it(monkeypatch):
    """As libtpu answers."""
    def described(platform, topology_name):
        if platform != "tpu" or topology_name not in ("v5e:2x2", "v5e:2x4"):
            raise RuntimeError(f'INVALID_ARGUMENT: Topology layout "{topology_name}" is not divisible by the given')
        return types.SimpleNamespace(devices=[None] * math.prod(map(int, topology_name[4:].split("x"))))

    monkeypatch.setattr(topologies, "get_topology_desc", described)
    assert len(devices_of(*targets.parse("v5ex8"))) == 8
    for target, there in (("v5ex7", "4 or 8"), ("v5ex3", "4"), ("v5ex100", "a power of two")):
        with pytest.raises(UserError, match=f"v5e has no slice of {target[4:]} devices; plan for {there}$"):
            devices_of(*targets.parse(target))


def test_a_target_whose_compiler_needs_the_device_is_refused():
    with pytest.raises(UserError, match="no compiler for mi300x"):
        devices_of(*targets.parse("mi300xx8"))
