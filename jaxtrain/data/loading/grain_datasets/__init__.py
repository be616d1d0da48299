"""Batches as Grain datasets: ours, and those that a user gives as `data=`."""
