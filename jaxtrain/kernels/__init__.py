"""The inner functions of a model with gradients written by hand, and cross-entropy without all logits at once."""
