"""Hand-written training steps in JAX and PyTorch that jaxtrain.bench compares a run with."""
