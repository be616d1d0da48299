"""Processes that form one run: how they connect, agree, watch each other and exit. Most of it imports no JAX."""
