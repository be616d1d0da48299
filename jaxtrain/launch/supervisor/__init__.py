"""The supervisor, which starts processes as one run and restarts them. It imports no JAX."""
