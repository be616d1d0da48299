"""Sweeps: the same config with other values of some keys, each as a job with a workdir of its own."""
