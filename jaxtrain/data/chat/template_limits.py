"""The bounds of rendering a chat template, for the process that renders and for the one that asks it."""

STEPS = 200_000  # repetitions of loops and calls in one rendering
LONGEST = 2**26  # characters of a text, or items of a list, that is put together
SOURCE = 2**20  # characters of a template
CALLS = 1000  # that may be nested
MEMORY = 2**30  # bytes of address space
SECONDS = 10.0  # of processor time for a conversation
EACH_S = 0.02  # further ones for each of its renderings: a long conversation needs many
MESSAGE = 2**29  # bytes of an answer
RECORD = 2**25  # bytes of a conversation
ORDINARY = 2**20  # bytes: if a smaller conversation takes too much, the template is at fault
TOGETHER, TOGETHER_BYTES = 16, 2**18  # conversations that are sent at a time
REASON = 200  # characters of the reason why a template fails
