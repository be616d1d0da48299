"""The training loop around one compiled step, and what takes part in it."""
