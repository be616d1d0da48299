"""Read the traced train step as operations, layouts and communication."""
