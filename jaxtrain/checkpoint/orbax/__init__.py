"""What Orbax lacks for checkpoints that survive lost processes."""
