"""The peak of memory is that of the fullest device, where devices tell."""

from types import SimpleNamespace

import jax
import pytest

from jaxtrain.observe.device_memory import device_memory


@pytest.mark.parametrize(("told", "peak"), [
    ([{"peak_bytes_in_use": 7, "bytes_in_use": 9}, {"peak_bytes_in_use": 8}], 8), ([None], None), ([{}], None),
    ([], None)])
def test_the_fullest_device_counts(monkeypatch, told, peak):
    devices = [SimpleNamespace(memory_stats=lambda one=one: one) for one in told]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert device_memory().get("memory_peak_bytes") == peak


def test_devices_that_cannot_tell_are_no_error(monkeypatch):
    def refuse():
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED")

    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=refuse)])
    assert device_memory() == {}
