"""The shipped configs: their shapes are the published ones, tiny variants lower and train, the largest ones lower."""

import math
import time
from pathlib import Path

import jax
import pytest

from jaxtrain.builder import build
from jaxtrain.config.load import load_config
from jaxtrain.errors import UserError
from jaxtrain.plan.estimate import estimate
from jaxtrain.plan.targets import parse
from tests.tiers import exhaustive, slow, slow_if

CONFIGS = sorted(Path(__file__).parents[1].glob("configs/*.py"))
TEXT = [file for file in CONFIGS if load_config(file).model.text]
TRAINED = ("gemma3_1b", "continued")  # other tests train the families of the others, too
LIKE_LLAMA3_8B = ("llama3_1b", "llama3_70b", "llama3_405b", "qwen3_0p6b")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"line {n} of a text that is long enough\n" for n in range(500)))
    return file


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_short_and_told(file):
    lines = file.read_text().splitlines()
    assert len(lines) < 60
    assert f"python -m jaxtrain.main --config=configs/{file.name}" in file.read_text().split('"""')[1]
    with pytest.raises(UserError, match="has no variant 'nonsense': known"):
        load_config(f"{file}:nonsense")
    load_config(file)


@pytest.mark.parametrize("name, overrides, count", [
    ("gpt.py:124m", {"model.vocab_size": 50257}, 124_439_808),
    ("qwen2p5_0p5b.py", {}, 494_032_768),
    ("qwen3_0p6b.py", {}, 596_049_920),
    ("llama3_1b.py", {}, 1_235_814_400),
    ("gemma3_1b.py", {}, 999_885_952),
    ("llama3_8b.py", {}, 8_030_261_248),
    ("llama3_70b.py", {}, 70_553_706_496),
    ("llama3_405b.py", {}, 405_853_388_800),
    ("olmo2_7b.py", {}, 7_298_617_344),
    ("mixtral_8x7b.py", {"mesh.expert": 1}, 46_702_792_704),
    ("qwen3_30b_a3b.py", {"mesh.expert": 1}, 30_532_122_624),
    ("gpt_oss_20b.py", {"mesh.expert": 1}, 20_914_757_184),
    ("gpt_oss_20b.py:120b", {"mesh.expert": 1}, 116_829_156_672),
    ("olmo3_7b.py", {}, 7_298_011_136),
    ("glm4_5_air.py", {"mesh.expert": 1}, 106_852_251_264),  # without the layer that looks ahead
    *slow(("kimi_linear_48b.py", {"mesh.expert": 1}, 49_122_681_728)),
    ("qwen3_5_9b.py", {}, 8_953_803_264),  # the text model
    *slow(("nemotron_h_8b.py", {}, 8_100_852_736)),
    # Without the 1500 positions of the encoder, which are not trained.
    ("whisper.py:tiny", {}, 37_760_640 - 1500 * 384), ("whisper.py:base", {}, 72_593_920 - 1500 * 512),
    ("whisper.py:small", {}, 241_734_912 - 1500 * 768), ("whisper.py:medium", {}, 763_857_920 - 1500 * 1024),
    ("whisper.py:large-v3", {}, 1_543_490_560 - 1500 * 1280),
    ("whisper.py:large-v3-turbo", {}, 808_878_080 - 1500 * 1280),
    # As published, with the routers' biases (58 x 256); the layer that looks ahead has 11.6 billion more.
    ("deepseek_v3.py", {"mesh.expert": 1, "mesh.tensor": 1}, 671_026_419_200),
    ("deepseek_v3.py", {"mesh.expert": 1, "mesh.tensor": 1, "model.mtp_loss_weight": 0.3},
     671_026_419_200 + 11_610_068_224),
])
def test_published_parameter_counts(name, overrides, count):
    run = build(load_config(CONFIGS[0].parent / name, overrides), devices=1)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(run.abstract.params)) == count


@pytest.fixture
def built(text, tmp_path):
    """The run of a config's tiny variant on two devices."""
    def of(file):
        source = {} if load_config(f"{file}:tiny").data.mixture else {"data.source": str(text)}
        run = build(load_config(f"{file}:tiny", source | {"data.cache_dir": str(tmp_path)}), devices=jax.devices()[:2])
        assert run.config.model.vocab_size == 320 and run.config.model.name == load_config(file).model.name
        return run

    return of


@pytest.mark.slow
@pytest.mark.parametrize("file", [file for file in TEXT if file.stem not in (*TRAINED, *LIKE_LLAMA3_8B)],
                         ids=lambda file: file.stem)
def test_tiny_lowers(file, built):
    assert "sdy.mesh" in built(file).lower().as_text()


@pytest.mark.parametrize("file", [  # test_readme runs the command of each before a release
    pytest.param(file, id=file.stem, marks=slow_if(file.stem in TRAINED)) for file in TEXT])
def test_tiny_trains(file, built):
    run = built(file)
    state, losses = run.init(), []
    for step in range(2):
        state, metrics = run.step(state, run.batch(step))
        losses.append(float(metrics["loss"]))
    assert abs(losses[0] - math.log(320)) < 0.3 and losses[1] < losses[0] and int(state.step) == 2


@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem, marks=slow_if(file.stem not in ("clips", "events")))
                                  for file in CONFIGS if file not in TEXT])
def test_what_is_no_decoder_of_text_is_planned(file):
    """With its parameters to the byte; how near time and memory are, tests/plan has of some."""
    config = load_config(f"{file}:{'words' if file.stem == 'whisper' else 'tiny'}")
    found, run = estimate(config, parse("h100x1", None)[0], 1), build(config, devices=1)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((run.abstract.params, run.abstract.frozen)))
    assert found.memory["parameters"] + found.memory["frozen parameters"] == held
    assert found.fits and found.seconds > 0 and found.memory["saved activations"] > 0


@pytest.mark.parametrize("name, devices, overrides", [
    ("llama3_8b.py", 32, {}),
    *slow(("llama3_405b.py", 2048, {"mesh.stage": 8, "mesh.tensor": 8, "mesh.context": 2, "mesh.fsdp": 16}),
          ("deepseek_v3.py", 2048, {}), ("qwen3_30b_a3b.py", 64, {})),
    *exhaustive(("llama3_70b.py", 256, {}), ("llama3_405b.py", 256, {"data.global_batch_size": 256}),
                ("llama3_70b.py", 2048, {"data.global_batch_size": 2048}), ("llama3_405b.py", 2048, {}),
                ("llama3_405b.py", 2048, {"mesh.data": 4}),
                ("deepseek_v3.py", 2048, {"mesh.stage": 16, "mesh.expert": 8, "mesh.fsdp": 16, "mesh.tensor": 1}),
                ("mixtral_8x7b.py", 64, {}), ("gpt_oss_20b.py", 64, {})),
])
def test_large_ones_lower_without_their_devices(name, devices, overrides):
    start = time.perf_counter()
    run = build(load_config(CONFIGS[0].parent / name, overrides), devices=devices)
    lowered = run.lower().as_text()
    mesh = " x ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items() if size > 1)
    print(f"{name} on {mesh}: lowered in {time.perf_counter() - start:.1f} s")
    assert f"x{run.config.model.embed_dim}x" in lowered and "sdy.mesh" in lowered
