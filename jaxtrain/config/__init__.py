"""The config: its sections as frozen dataclasses, the families of models, and how files and overrides are read."""
