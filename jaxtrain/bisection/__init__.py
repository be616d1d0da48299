"""Find where two runs part: the step, and the operation in it."""
