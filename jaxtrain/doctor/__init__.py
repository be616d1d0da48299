"""Why training would not work, or be slow, on this machine: found out before anyone pays for it.

`python -m jaxtrain.doctor`. A check is a function of what it looks at (an environment, versions, what a probe found)
that returns findings, each with its fix. What can hang or crash, such as JAX itself or a file system over a network,
runs in a process of its own (`child.py`).
"""
