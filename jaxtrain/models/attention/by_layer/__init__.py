"""Attention of layers in one stack, whose windows, chunks or rotary positions depend on the number of the layer."""
