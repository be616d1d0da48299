"""Pipeline parallelism: one executor for any schedule."""
