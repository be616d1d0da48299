"""Layers with experts in place of an MLP: the router, and the layer around it."""
