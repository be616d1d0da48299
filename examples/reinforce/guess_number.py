"""A game for `rl.environment`: guess a number from 1 to 16, in as few guesses as possible.

    python examples/reinforce/guess_number.py FOLDER

writes FOLDER/examples.jsonl, conversations of a player who guesses at random among the numbers that are left, to begin
with. The game needs no prompts: the seed is all that a number depends on.
"""

import json
import random
import sys
from pathlib import Path

MOST = 16


class GuessTheNumber:
    """One game. An answer that is no number is answered, too."""

    def reset(self, record, seed):
        """Think of a number."""
        self.number, self.guesses = random.Random(seed).randint(1, MOST), 0
        return f"1 to {MOST}?"

    def step(self, answer):
        """Return a hint, or end the game; a guess costs a tenth."""
        self.guesses += 1
        try:
            guess = int(answer)
        except ValueError:
            return "a number", 0.0, False
        if guess == self.number:
            return "", 1.1 - 0.1 * self.guesses, True
        return "more" if guess < self.number else "less", 0.0, False


def played(rng):
    """Return the messages of a game."""
    game, low, high = GuessTheNumber(), 1, MOST
    said, done = game.reset({}, rng.random()), False
    messages = [{"role": "user", "content": said}]
    while not done:
        guess = rng.randint(low, high)
        said, _, done = game.step(str(guess))
        messages += [{"role": "assistant", "content": str(guess)}, {"role": "user", "content": said}]
        low, high = (guess + 1, high) if said == "more" else (low, guess - 1)
    return messages[:-1]


if __name__ == "__main__":
    rng, folder = random.Random(0), Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "examples.jsonl").write_text("".join(json.dumps({"messages": played(rng)}) + "\n" for _ in range(6000)))
