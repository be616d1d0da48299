"""Answers that the train step draws itself (`rl.exact`)."""
