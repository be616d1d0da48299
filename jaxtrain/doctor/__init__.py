"""Find out why training would not work, or be slow, on this machine, before time is spent on it.

`jaxtrain doctor`. A check is a function of its inputs (an environment, versions, what a probe measured) that
returns findings, each with its fix. Anything that can hang or crash, such as JAX itself or a network file system, runs
in a process of its own (`child.py`).
"""
