"""Checkpoints in the memory of the hosts, for a quick recovery."""
