"""Qwen2 and Qwen2.5 dense: Llama's blocks with biases on queries, keys and values alone (arXiv 2407.10671)."""

from functools import partial

from jaxtrain.models.llama import llama

qwen2 = partial(llama, qkv_bias=True)
