"""2:4 structured sparsity: which kernels of a model become sparse (how: train_step/optimizers/structured_sparsity.py)."""
