"""Encoders of pictures, and models that have one."""
