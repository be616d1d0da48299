"""Characters that Unicode reserves for a program's own use: they mark parts of a text, and occur in no text."""

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # around a part that is trained on
BREAK, CODE = "\ufdd2", "\ufdd3"  # within what only looks like a special token; around the id of a special token
