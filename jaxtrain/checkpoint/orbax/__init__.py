"""Extensions of Orbax for checkpoints that survive lost processes."""
