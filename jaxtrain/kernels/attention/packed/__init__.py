"""The kernels of packed attention: Mosaic's for H100 and H200, and Triton's for all NVIDIA GPUs since A100."""
