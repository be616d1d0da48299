"""Runs on a virtual clock: what failures will cost, with the decisions that the supervisor and the savers really make."""
