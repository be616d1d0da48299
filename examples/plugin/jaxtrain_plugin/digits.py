"""An environment of reinforcement learning: answers of digits are rewarded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Digits:
    """Digits: the share of an answer that is digits."""

    wanted: str = "0123456789"  # the characters that are rewarded

    def __call__(self, answer, record):
        """Return the reward of an answer to the prompt of a record, a line of `rl.prompts`."""
        return sum(letter in self.wanted for letter in answer) / max(1, len(answer))
