"""The traced train step, read as operations, layouts and communication."""
