"""Estimates of the memory and time that a traced step takes on given hardware."""
