"""Counted by hand, and against published figures."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxtrain.builder import build
from jaxtrain.config.decoder_config import DecoderConfig
from jaxtrain.config.load import load_config, make_config
from jaxtrain.models.deepseek_v3 import DeepseekV3Config
from jaxtrain.models.mamba2 import Mamba2Config
from jaxtrain.models.qwen3_5 import Qwen35Config
from jaxtrain.observe import device_peak, flops_per_token, mfu
from jaxtrain.plan import targets
from jaxtrain.plan.estimate import estimate
from jaxtrain.plan.preflight import shown
from jaxtrain.train_step.report import matmul_parameters, report
from jaxtrain.trainer.reporting import constants
from jaxtrain.tuning.teacher import distillation
from tests.numerics import reference

CONFIGS = Path(__file__).parents[2] / "configs"

LLAMA_8B = DecoderConfig(vocab_size=128_256, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8,
                         mlp_dim=14_336, max_seq_len=8192)
M = 7_504_658_432  # 32 x (wq, wo: 2 x 4096^2; wk, wv: 2 x 4096 x 1024; 3 x 4096 x 14336) + head


@pytest.mark.parametrize(("seq_len", "causal", "giga"), [(4096, True, 48.2), (4096, False, 51.5), (8192, True, 51.5),
                                                         (8192, False, 57.9)])
def test_llama_8b(seq_len, causal, giga):
    assert round(flops_per_token(LLAMA_8B, M, seq_len, causal) / 1e9, 1) == giga


def test_of_the_experts_only_those_at_work_count():
    """Mixtral has 46.7 billion parameters, of which 12.9 are active, 0.13 of them a lookup; DeepSeek-V3 671 and 37.

    gpt-oss 20B has 3.61 without the lookup (arXiv 2508.10925).
    """
    for name, billions in (("mixtral_8x7b", 12.88 - 0.13), ("deepseek_v3", 37.55 - 0.93), ("gpt_oss_20b", 3.61)):
        alone = {"mesh.data": 1, "mesh.expert": 1, "mesh.tensor": 1}
        run = build(load_config(CONFIGS / f"{name}.py", alone), devices=1)
        count = matmul_parameters(run.abstract, run.layout, run.config.model)
        assert count / 1e9 == pytest.approx(billions, abs=0.02)


def test_frozen_matrices_have_no_gradient_and_a_teacher_is_not_the_model():
    """Forward, and the gradient of what goes in: 4 of 6 FLOPs. Here the MLP's three matrices are frozen."""
    config = {"model": dict(name="llama", num_layers=2, embed_dim=32, num_heads=4, vocab_size=64, mlp_dim=48),
              "data": {"seq_len": 32}, "mesh": {"data": 1}}
    plain = build(make_config(config), devices=1)
    frozen = build(make_config(config | {"train": {"freeze": ["*/mlp/*"]}}), devices=1,
                   objective=distillation(plain.config))
    counts = [matmul_parameters(run.abstract, run.layout, run.config.model, run.objective.frozen_axes)
              for run in (plain, frozen)]
    assert counts[0] - counts[1] == pytest.approx(2 * 3 * 32 * 48 / 3)


@pytest.mark.parametrize("tied", [True, False])
def test_a_reward_model_has_no_output_projection(tied):
    config = {"model": dict(name="llama", num_layers=2, embed_dim=32, num_heads=4, vocab_size=64, tied_embeddings=tied),
              "mesh": {"data": 1}}
    scored = config | {"preference": {"loss": "reward"}, "data": {"packing": "pairs"}}
    counts = [matmul_parameters(run.abstract, run.layout, run.config.model)
              for run in (build(make_config(each), devices=1) for each in (config, scored))]
    assert counts[0] - counts[1] == 32 * 64


def test_looking_ahead_costs_a_layer_two_projections_and_the_head_again():
    shape = dict(name="llama", num_layers=2, embed_dim=32, num_heads=4, vocab_size=64, mlp_dim=48)
    plain, ahead = (build(make_config({"model": shape | {"mtp_loss_weight": loss}, "mesh": {"data": 1}}), devices=1)
                    for loss in (0.0, 0.3))
    counts = [matmul_parameters(run.abstract, run.layout, run.config.model) for run in (plain, ahead)]
    assert counts[1] - counts[0] == 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32 * 32 + 32 * 64
    assert flops_per_token(ahead.config.model, 0, 10, False) == 1.5 * flops_per_token(plain.config.model, 0, 10, False)


def test_layers_of_two_widths_count_each_and_inputs_of_layers_are_lookups():
    shape = dict(name="gemma4", num_layers=2, layer_pattern="LG", embed_dim=32, num_heads=4, vocab_size=64, head_dim=8,
                 global_head_dim=16, window=4)
    plain, more = (build(make_config({"model": shape | {"per_layer_dim": width}, "mesh": {"data": 1}}), devices=1)
                   for width in (0, 6))
    assert flops_per_token(plain.config.model, 0, 8, False) == 6 * 4 * (16 * 4 + 32 * 8)
    counts = [matmul_parameters(run.abstract, run.layout, run.config.model) for run in (plain, more)]
    assert counts[1] - counts[0] == 32 * 12 + 2 * 2 * 32 * 6  # of all inputs, and two of each layer


def test_latent_attention_counts_both_widths():
    model = DeepseekV3Config(num_layers=2, num_heads=4, head_dim=16, rope_head_dim=8, value_head_dim=12, kv_rank=8)
    assert flops_per_token(model, 0, 10, causal=False) == 6 * 2 * 4 * (16 + 8 + 12) * 10


def test_states_are_read_for_the_key_written_and_read_for_the_query():
    """Three of four layers have 4 states of 8 x 16: 3 products of 2 FLOPs an entry, and twice that backward."""
    model = Qwen35Config(num_layers=8, embed_dim=32, num_heads=2, head_dim=32, state_heads=4, state_key_dim=8,
                         state_value_dim=16)
    states = 3 * 6 * (3 * 2 * 4 * 8 * 16)
    assert flops_per_token(model, 0, 10, causal=False) == states + 12 * 2 * 2 * 32 * 10


def test_mamba_states_are_written_and_read():
    """Two layers with 4 states of 8 x 16, and no attention."""
    model = Mamba2Config(num_layers=2, num_heads=4, head_dim=8, state_dim=16)
    assert flops_per_token(model, 0, 10, causal=True) == 3 * 2 * (2 * 2 * 4 * 8 * 16)


def test_heads_count_not_the_embedding():
    wide = DecoderConfig(num_layers=2, embed_dim=64, num_heads=4, head_dim=32)
    assert flops_per_token(wide, 0, 10, causal=False) == 12 * 2 * 4 * 32 * 10


@pytest.mark.parametrize("window", [64, 1000, 4000])
def test_window_counts_the_keys_a_query_sees(window):
    model, seq_len = DecoderConfig(num_layers=1, embed_dim=2, num_heads=1, window=window), 4096
    seen = sum(min(i + 0.5, window) for i in range(seq_len)) / seq_len  # a query sees half of its own key
    assert flops_per_token(model, 0, seq_len, causal=True) / 24 == pytest.approx(seen, rel=1e-6)
    assert flops_per_token(model, 0, seq_len, causal=False) == 24 * window


def test_window_longer_than_the_row_is_no_window():
    windowed, plain = DecoderConfig(window=512), DecoderConfig()
    for causal in (True, False):
        assert flops_per_token(windowed, 5, 128, causal) == flops_per_token(plain, 5, 128, causal)


@pytest.mark.parametrize(("kind", "tera"), [
    ("TPU v4", 275), ("TPU v5 lite", 197), ("TPU v5e", 197), ("TPU v5", 459), ("TPU v5p", 459), ("TPU v6 lite", 918),
    ("TPU v6e", 918), ("TPU7x", 1153.5), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 989),
    ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989), ("NVIDIA GH200 480GB", 989),
    ("NVIDIA B200", 2250), ("NVIDIA GB200", 2500), ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("cpu", None),
    ("NVIDIA A10G", None), ("TPU v4 lite", None),
])
def test_device_peak(kind, tera):
    assert device_peak(kind) == (tera and tera * 1e12)


OTHERS = ("siglip_b16.py:tiny", "vision_language.py:tiny", "image_flow.py:tiny", "whisper.py:words")


@pytest.mark.parametrize("name", OTHERS)
def test_no_mfu_where_steps_of_a_row_do_not_meet_all_matrices(name):
    run = SimpleNamespace(own=None, config=load_config(CONFIGS / name, {}))
    told = constants(run, SimpleNamespace(shape=lambda step: (8, 16), tokens=lambda step: 128 * step))(2)
    assert (told.tokens_per_step, told.tokens_before) == (128, 256) and told.peak is None and not told.flops_per_token


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vision_language.py:tiny", "whisper.py:words"])
def test_the_planner_says_one_where_rows_may_be_taken_to_be_full(name):
    guess = estimate(load_config(CONFIGS / name, {"mesh.fsdp": 1}), *targets.parse("h100x1", None))
    known = name.startswith("whisper")
    assert guess.seconds > 0 and (0 < guess.mfu < 1) == known == bool(guess.mfu_said) == ("MFU" in shown(guess))


def test_mfu_of_a_published_run():
    """Llama-3-8B on one H200, 10,471 tokens/s at 4096: 51.1 % causal, 54.5 % full."""
    for causal, percent in ((True, 51.1), (False, 54.5)):
        flops = flops_per_token(LLAMA_8B, M, 4096, causal)
        assert round(100 * mfu(10_471, flops, device_peak("NVIDIA H200")), 1) == percent


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_matrices_in_few_bits_count_as_whole_ones(kind):
    plain, few = (reference.build("llama", lora__rank=3, lora__quantize=bits) for bits in ("", kind))
    counts = [matmul_parameters(run.abstract, run.layout, run.config.model) for run in (plain, few)]
    assert counts[0] == counts[1]
    told = [next(line for line in report(run.abstract, run.layout).splitlines() if line.startswith("frozen:"))
            for run in (plain, few)]
    assert told[0].partition(" parameters")[0] == told[1].partition(" parameters")[0] and told[0] != told[1]
