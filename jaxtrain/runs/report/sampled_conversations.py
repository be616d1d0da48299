"""Read the answers and conversations of a run that learns from them, as many as a page has room for."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.files.bounded_files import json_lines
from jaxtrain.redaction import redacted

STEPS, ANSWERS, TURNS = 40, 16, 40  # at most, on a page
LETTERS = 2_000  # of a turn
ROOM = 4_000_000  # letters of a page
_ENDS = {"stop": "ended", "length": "cut off", "error": "the environment failed"}
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: str
    kind: str  # one of those that have a colour: "system", "user", "assistant", "tool", "other"
    text: str
    notes: list[str]  # its reward, tokens and end


@dataclass(frozen=True)
class Answer:
    """An answer to a prompt, or a conversation."""

    title: str
    notes: list[str]
    reward: float
    turns: list[Turn]
    more: int  # turns that are not shown


@dataclass(frozen=True)
class Step:
    """The answers that were first trained on in a step."""

    number: int
    notes: list[str]
    answers: list[Answer]
    more: int  # answers that are not shown


def files(workdir: Path) -> list[Path]:
    """Return the files of answers that a run has written, by step."""
    return sorted((path for path in (workdir / "rollouts").glob("*.jsonl") if path.stem.isdecimal()),
                  key=lambda path: int(path.stem))


def steps(workdir: Path) -> list[Step]:
    """Return steps of a run, evenly spaced if there are too many, up to as many letters as a page has room for."""
    there = files(workdir)
    chosen = [there[place] for place in sorted({*np.linspace(0, len(there) - 1, STEPS).round().astype(int).tolist()})
              ] if there else []
    room = ROOM // max(1, len(chosen))
    return [_step(path, room) for path in chosen]


def _step(path: Path, room: int) -> Step:
    lines = [line for line in json_lines(path)]
    rewards = [line["reward"] for line in lines if _is_number(line.get("reward"))]
    sizes = [_sampled(line) for line in lines]
    notes = [f"{len(lines):,} answers"]
    if rewards:
        notes.append(f"mean reward {np.mean(rewards):.4g}, from {min(rewards):.4g} to {max(rewards):.4g}")
    if lines:
        cut = sum(line.get("finish_reason") == "length" for line in lines) / len(lines)
        notes += [f"{np.mean(sizes):.4g} tokens on average", f"{cut:.0%} cut off"]
    shown: list[Answer] = []
    for number, line in enumerate(lines[:ANSWERS], start=1):
        answer = _answer(number, line)
        room -= sum(len(turn.text) for turn in answer.turns)
        if room < 0 and shown:
            break
        shown.append(answer)
    return Step(int(path.stem), notes, shown, len(lines) - len(shown))


def _answer(number: int, line: JsonObject) -> Answer:
    turns = line["turns"] if isinstance(line.get("turns"), list) else [*_asked(line.get("prompt")), {
        "role": "assistant", "content": line.get("text", "")}]
    turns = [turn for turn in turns if isinstance(turn, dict)]
    notes = [f"reward {line['reward']:.4g}"] if _is_number(line.get("reward")) else ["not rewarded yet"]
    scores = line.get("scores")
    if isinstance(scores, dict) and len(scores) > 1:
        notes += [f"{cleaned(name)} {value:.4g}" for name, value in scores.items() if _is_number(value)]
    notes.append(_tokens(_sampled(line)))
    answers = sum("reward" in turn for turn in turns)
    if answers > 1:
        notes.append(f"{answers} turns")
    notes.append(_ENDS.get(f"{line.get('finish_reason')}", ""))
    reward = float(line["reward"]) if _is_number(line.get("reward")) else 0.0
    return Answer(f"{number}", [note for note in notes if note], reward, [_turn(turn) for turn in turns[:TURNS]],
                  max(0, len(turns) - TURNS))


def _asked(prompt: Json) -> Sequence[Json]:
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt or ""}]


def _turn(turn: JsonObject) -> Turn:
    role = cleaned(turn.get("role", ""))[:40] or "?"
    kind = {"developer": "system", "function": "tool"}.get(role, role)
    notes = []
    if "reward" in turn:
        notes.append(_tokens(turn.get("tokens", 0)))
        if _is_number(turn["reward"]) and turn["reward"]:
            notes.append(f"reward {turn['reward']:.4g}")
        if turn.get("finish_reason") == "length":
            notes.append("cut off")
    text = f"{turn.get('content') or ''}"
    if turn.get("error"):
        notes.append(shortened(f"{turn['error']}"))
    if turn.get("tool_calls"):
        text = f"{text}\n{json.dumps(turn['tool_calls'], ensure_ascii=False)}".strip()
    kind = kind if kind in ("system", "user", "assistant", "tool") else "other"
    return Turn(role, kind, shortened(text), notes)


def cleaned(text: object) -> str:
    """Return text without credentials, and with characters that steer its display spelled out."""
    said = f"{redacted(f'{text}')}".encode(errors="backslashreplace").decode()
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", said)


def shortened(text: str) -> str:
    """Return a text cleaned, and only its beginning and its end if it is too long."""
    if len(text) <= LETTERS:
        return cleaned(text)
    # Cleaned with more around it, so that no credentials are cut in two before they are found.
    begin, end = cleaned(text[:LETTERS])[:LETTERS // 2], cleaned(text[-LETTERS:])[-LETTERS // 2:]
    return f"{begin}\n[… {len(text) - LETTERS:,} characters …]\n{end}"


def _sampled(line: JsonObject) -> int:
    """Return the number of tokens that the model sampled."""
    if isinstance(line.get("turns"), list):
        sizes = [turn.get("tokens") for turn in line["turns"] if isinstance(turn, dict) and "reward" in turn]
        return sum(size for size in sizes if isinstance(size, int))
    return len(line["tokens"]) if isinstance(line.get("tokens"), list) else 0


def _tokens(count: object) -> str:
    return "1 token" if count == 1 else f"{count:,} tokens" if isinstance(count, int) else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300
