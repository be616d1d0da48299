"""2:4 structured sparsity: which kernels become sparse (how: train_step/optimizers/structured_sparsity.py)."""
