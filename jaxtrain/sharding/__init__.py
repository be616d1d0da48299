"""Logical axis names, the rules that map them to a device mesh, and the mesh itself."""
