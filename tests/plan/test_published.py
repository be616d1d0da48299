"""The comparison with published results predicts the program that users have."""

from tools import bench_published


def test_attention_is_a_kernel_on_gpus_only():
    rows = {row.name: row for row in bench_published.ROWS}
    (gpu,) = rows["MaxText (JAX-Toolbox) Llama-2 7B, 8 h100"].predict()
    (tpu,) = rows["MaxText Llama-3.1 8B, 8 v6e"].predict()
    assert gpu.time.parts["attention"] > 0 and "attention" not in tpu.time.parts
    model, rows = tpu.config.model, 3
    scores = 4 * rows * model.num_heads * tpu.config.data.seq_len**2  # float32, of one layer
    assert tpu.memory["working memory"] > scores
