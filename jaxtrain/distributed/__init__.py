"""The processes of one run: how they connect, agree, monitor each other and exit. Most of it imports no JAX."""
