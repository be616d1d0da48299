"""The closed form for islands, by hand."""

import numpy as np
import pytest

from jaxtrain.config.sections.diloco_keys import DilocoConfig
from jaxtrain.plan.cost.island_time import modes, progress_bytes


def seconds(islands, **keys):
    return {mode.name: mode.seconds for mode in modes(islands, 1.0, 10**9, 1e9, latency=0.1, **keys)}


def test_the_closed_form_by_hand():
    """Four islands, a step of a second, 4 GB of parameters, 1 GB/s."""
    found = seconds(DilocoConfig(count=4, every=100))
    # A ring moves 2 x 3/4 x 4 GB in 6 s and six hops of half a way; two thirds of a second are hidden.
    assert found["synchronous"] == pytest.approx(1 + 6 + 0.3 - 2 / 3)
    # 4 GB there, 12 GB back and three ways, in every hundredth step.
    assert found["DiLoCo"] == pytest.approx(1 + 16.3 / 100) == found["asynchronous"]
    assert "streaming" not in found
    # Progress and outer parameters, to one island and from it, however many there are.
    assert found["gossip"] == pytest.approx(1 + 16.3 / 100)
    assert seconds(DilocoConfig(count=64, every=100))["gossip"] == found["gossip"]
    assert seconds(DilocoConfig(count=4, every=100, compression="int4"))["gossip"] == pytest.approx(
        1 + (2 * 4.5625 + 0.3) / 100)
    assert "gossip" not in seconds(DilocoConfig(count=1, every=100))
    behind = [seconds(DilocoConfig(count=4, every=100, mode=mode, overlap=6)) for mode in ("sync", "gossip")]
    assert behind[0] == behind[1] and behind[0]["gossip"] == behind[0]["streaming"] == pytest.approx(1 + 10.3 / 100)


def test_a_coordinator_s_port_carries_what_all_islands_send_and_receive():
    """Four islands, of 4 GB each: 16 GB to the port and 48 GB from it, at 1 GB/s."""
    assert seconds(DilocoConfig(count=4, every=100), port=1e9) == pytest.approx(
        seconds(DilocoConfig(count=4, every=100)) | {
            "DiLoCo": 1 + 64.3 / 100, "gossip": 1 + 64.3 / 100,  # of gossip 32 GB each way
            "asynchronous": 1 + 16.3 / 100})  # one at a time: there is room for all within 116.3 s
    assert seconds(DilocoConfig(count=4, every=20), port=1e9)["asynchronous"] == pytest.approx(48 / 20)
    found = seconds(DilocoConfig(count=4, every=100, fragments=4, overlap=2), port=1e9)
    assert found["streaming"] == pytest.approx(1 + (16 + 0.3 - 2) / 25)


def test_a_fragment_hides_behind_the_steps_that_overlap_it():
    found = seconds(DilocoConfig(count=4, every=100, fragments=4, overlap=2, compression="int4"))
    # 0.5625 / 4 GB there, three times as much back and three ways take less than two steps.
    assert found["streaming"] == 1
    assert found["gossip"] == pytest.approx(1 + (2 * 4.5625 + 0.3 - 2) / 100)  # behind as many
    found = seconds(DilocoConfig(count=4, every=100, fragments=4, overlap=2))
    assert found["streaming"] == pytest.approx(1 + (4 + 0.3 - 2) / 25)


def test_factors_have_bytes_by_the_shapes_of_matrices():
    def shape(*sizes):
        return np.zeros(sizes, np.float32)

    params = {"a": shape(3, 100, 40), "b": shape(40), "c": shape(50, 60), "d": shape(4, 5), "e": shape(2, 80, 6, 7)}
    axes = {"a": ("layers", "embed", "mlp"), "b": ("norm",), "c": None, "d": None,
            "e": ("every_layer", "embed", "heads", "head_dim")}
    islands = DilocoConfig(count=4, every=100, compression="power_sgd", rank=3)
    want = 4 * (3 * 3 * (100 + 40) + 40 + 3 * (50 + 60) + 4 * 5 + 2 * 3 * (80 + 6 * 7))
    assert progress_bytes(islands, params, axes) == want
    found = {mode.name: mode.sent * 100 for mode in modes(islands, 1.0, 10**6, 1e9, progress=want)}
    assert found["DiLoCo"] == found["asynchronous"] == pytest.approx(want)
    assert found["gossip"] == pytest.approx(want + 4 * 10**6)
    assert progress_bytes(DilocoConfig(count=4, compression="int4"), params, axes) == pytest.approx(
        0.5625 * (3 * 100 * 40 + 40 + 50 * 60 + 4 * 5 + 2 * 80 * 6 * 7))


def test_which_mode_is_fastest_depends_on_link_and_straggler():
    def fastest(link, slowest):
        islands = DilocoConfig(count=4, every=100)
        return modes(islands, 1.0, 10**6, link, latency=0.001, slowest=slowest)[0].name

    assert fastest(1e11, 1.0) == "synchronous"
    assert fastest(1e6, 1.0) == "DiLoCo"
    assert fastest(1e6, 3.0) == "asynchronous"
