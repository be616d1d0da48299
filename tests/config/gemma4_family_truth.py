"""The shapes that transformers takes from config.json files of Gemma 4; see `families_truth`."""

from typing import Any

from tests.config.dense_families_truth import empty, epsilon, rotary


def shape(c: Any) -> dict[str, Any]:
    """Return the shape of a model, as `gemma4_family.shape` does."""
    model, heads = empty(c), c.num_attention_heads
    body, turning = model.model, rotary(model, c)
    assert len(c.layer_types) == c.num_hidden_layers and c.use_bidirectional_attention != "all"
    letters = {"L": "sliding_attention", "G": "full_attention"}
    layers = [_layer(layer, kind, c) for layer, kind in zip(body.layers, c.layer_types, strict=True)]
    table = getattr(body, "embed_tokens_per_layer", None)
    assert table is None or table.num_embeddings >= c.vocab_size  # others have no input
    router = body.layers[0].router if c.enable_moe_block else None
    assert router is None or c.top_k_experts <= c.num_experts
    return {"vocab_size": body.embed_tokens.num_embeddings, "width": body.embed_tokens.embedding_dim, "heads": heads,
            "length": c.max_position_embeddings, "tied": bool(c.tie_word_embeddings), "eps": epsilon(body.norm),
            "layers": layers, "cap": float(c.final_logit_softcapping or 0),
            "experts": router and [router.proj.out_features, c.top_k_experts, c.moe_intermediate_size],
            "turns": {letter: [*map(float, getattr(turning, f"{name}_inv_freq"))] for letter, name in letters.items()
                      if name in c.layer_types},
            "inputs": None if table is None else [c.hidden_size_per_layer_input, table.num_embeddings]}


def _layer(layer: Any, kind: str, c: Any) -> list[Any]:
    attention = layer.self_attn
    width, keys = attention.head_dim, getattr(attention, "k_proj", None)
    kv = None if keys is None else keys.out_features // width
    assert width % 2 == 0 and c.num_attention_heads % (kv or 1) == 0
    return [c.sliding_window if kind == "sliding_attention" else 0, width, kv,
            getattr(attention, "v_proj", None) is not None, attention.q_proj.bias is not None,
            layer.mlp.down_proj.in_features]
