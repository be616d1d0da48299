"""Hand-written training steps in JAX and PyTorch, with which jaxtrain.bench compares a run."""
