"""What keeps a run alive, or ends it well. Importing this must not import JAX: the supervisor does without."""
