"""Hybrids: the kinds of their layers, and the sizes of states."""
