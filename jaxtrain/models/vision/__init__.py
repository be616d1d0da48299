"""Encoders of images, and models that have one."""
