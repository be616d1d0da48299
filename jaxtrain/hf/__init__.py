"""The parts of reading and writing config.json of published models."""
