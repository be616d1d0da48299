"""Prepare a corpus in tasks that can be interrupted, on one machine, Ray or Slurm."""
