"""What a published model is released with: gates that its answers have to pass, and its card."""
