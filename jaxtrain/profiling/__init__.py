"""Profiles of training steps: asked for, traced while a run trains, and summarised."""
