"""Fit a scaling law to finished runs, and say what other runs reach by it."""
