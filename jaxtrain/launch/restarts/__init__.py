"""Restarts of jobs: which failure decides, how many there may be, and what people are told of them."""
