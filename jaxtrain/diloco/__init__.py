"""Training on islands that talk seldom: each an ordinary run, joined by an ordered log of outer updates."""
