"""Qwen3 dense: Llama's blocks with RMSNorm on queries and keys, and an independent head width (arXiv 2505.09388)."""

from functools import partial

from jaxtrain.models.llama import llama

qwen3 = partial(llama, qk_norm=True)
