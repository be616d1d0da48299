"""Estimate the memory and time of a traced step on given hardware."""
