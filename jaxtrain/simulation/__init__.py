"""Runs on a virtual clock: what failures cost, by the rules of the supervisor, the watchdog and the savers."""
