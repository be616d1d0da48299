"""The names of precisions whose matrix products have factors of 8 or 4 bits (docs/training.md)."""

NARROW = ("fp8", "mxfp8", "nvfp4")
BLOCKS = {"mxfp8": 32, "nvfp4": 16}  # values with one scale
