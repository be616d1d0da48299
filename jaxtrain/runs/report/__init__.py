"""Runs as one self-contained page: curves, time, events, config and statistics over seeds."""
