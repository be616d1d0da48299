"""In-memory checkpoints on the hosts, for fast recovery."""
