"""Proofs that a run has the numbers of one device on any mesh: `jt.prove` and `jaxtrain prove`."""
