"""The kernels of GPUs among all else that a step may be made of: drawn on one device, where Pallas interprets them.

tests/composition/fuzz.py runs these cases. The interpreter runs on one device only, and needs JAX 0.11 or newer.
"""

import random
from typing import Any

from tests.composition import fuzz

ROWS = 4  # interpretation is slow


def draw(rng: random.Random) -> dict[str, Any]:
    """One config, as keys like those of a command line, with shapes that the kernels can compute."""
    keys = fuzz.draw(rng, 1)
    own = random.Random(f"{sorted(keys.items())}")
    keys = {key: value for key, value in keys.items() if key not in ("model.mup_base", "model.query_scale")}
    seq = 32 if keys["family"] in fuzz.EXPERTS else own.choice((32, 160))
    wide = 128 if keys["train.precision"] == "fp8" else 64
    # JAX does not lower the interpreter's ordered effects where anything lies in the hosts' memory.
    keys |= {"model.embed_dim": wide, "model.num_heads": 2, "model.head_dim": own.choice((64, 64, 80)),
             "model.num_layers": 2 + (keys["family"] == "gpt_oss"), "model.max_seq_len": seq, "data.seq_len": seq,
             "train.remat": keys["train.remat"].replace("@host", ""), "optimizer.offload": False,
             "optimizer.name": "adamw", "evaluate": False, "value_and_grad": False,  # all of them run one program
             "data.global_batch_size": ROWS, "empty": "stride" if keys["empty"] else "", "train.attention": "mosaic"}
    if not keys["family"].startswith("gpt2") and keys["family"] != "deepseek_v3":
        keys |= {"model.num_kv_heads": own.choice((1, 2))}
    if keys["family"] == "gemma3":
        keys |= {"model.query_scale": 9}
    if keys["family"] == "deepseek_v3":
        keys |= {"model.value_head_dim": own.choice((16, 64)), "model.rope_head_dim": own.choice((2, 16))}
    if keys["family"] in fuzz.EXPERTS:
        # Of adapters, and of what a capacity leaves, the kernels take no part: "auto" computes those otherwise.
        odd = "lora.rank" in keys or keys.get("model.capacity_factor")
        keys |= {"model.expert_mlp_dim": wide, "train.grouped_matmul": "auto" if odd else "mosaic"}
        keys |= {"train.expert_buffer": max(1.0, keys["train.expert_buffer"])}
        # Multiples of 128 rows, for 2 or 3 experts of a token.
        keys |= {"train.accumulation": 1 if keys["family"] in ("qwen3_moe", "gpt_oss") else min(
            keys["train.accumulation"], 2)}
        keys |= {"model.experts_every": 1} if "model.experts_every" in keys else {}
        keys |= {"train.expert_exchange": "auto"}
    later = random.Random(f"wide {sorted(keys.items())}")  # added later: others stay as drawn
    if keys["family"] != "deepseek_v3" and later.random() < 0.2:
        keys |= {"model.head_dim": later.choice((136, 256))}
    return keys | {"train.loss_kernel": later.choice(("triton", "xla"))}


def interpret() -> None:
    """Let Pallas's interpreter run the kernels, in float32 too, wherever shapes allow them."""
    from jax._src import callback, effects
    from jax.experimental.pallas import mosaic_gpu

    from jaxtrain.kernels import grouped_matmul
    from jaxtrain.kernels.attention import mosaic_attention
    from jaxtrain.kernels.loss_head import triton_logits

    for kernels in (grouped_matmul, mosaic_attention):
        kernels.INTERPRET = mosaic_gpu.InterpretGPUParams()
    triton_logits.INTERPRET = True
    for allowed in (effects.remat_allowed_effects, effects.custom_derivatives_allowed_effects,
                    effects.control_flow_allowed_effects):
        allowed.add_type(type(callback._OrderedIOEffect))
