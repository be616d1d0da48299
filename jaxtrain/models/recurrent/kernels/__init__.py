"""Kernels for what is within the chunks of recurrent layers."""
