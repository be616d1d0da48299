"""The comparison with published results predicts the program that users have."""

import pytest

from tools.benchmarks import bench_published


@pytest.mark.slow
def test_attention_is_a_kernel_on_gpus_and_tpus():
    rows = {row.name: row for row in bench_published.ROWS}
    (gpu,) = rows["MaxText (JAX-Toolbox) Llama-2 7B, 8 h100"].predict()
    (tpu,) = rows["MaxText Llama-3.1 8B, 8 v6e"].predict()
    assert gpu.time.parts["attention"] > 0
    model, rows, length = tpu.config.model, 3, tpu.config.data.seq_len
    scores = 4 * rows * model.num_heads * length**2  # float32, of one layer
    assert tpu.memory["working memory"] < scores
    # Blocks of 1,024: 36 of 64 are computed, in the first pass, again in the backward pass, and by seven products.
    blocks = 2 * rows * model.num_layers * model.num_heads * model.head_dim * length**2 * 36 / 64
    rate = tpu.target.peak["bfloat16"] * tpu.target.efficiency["attention"]
    assert abs(tpu.time.parts["attention"] / (blocks * (2 + 2 + 7) / rate) - 1) < 0.02
