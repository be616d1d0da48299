"""Prometheus: the metrics that a process of a run exports, and the dashboards and alert rules made for them."""
