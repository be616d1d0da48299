"""The log of islands by TCP: certificates, frames, the coordinator's server and an island's client."""
