"""Measured rates of this machine's devices, in place of a data sheet's."""
