"""Kernels for chunks of tokens of recurrent layers, one call for each chunk and head."""
