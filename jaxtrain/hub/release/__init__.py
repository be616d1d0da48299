"""The release of a published model: gates that its answers have to pass, and its card."""
