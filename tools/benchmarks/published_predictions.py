"""The recorded predictions of published runs, and how far they are from what these took.

A prediction is recorded once for each question (`Row.question`), as a line of
docs/measurements/predictions/published.jsonl, so that reading the record traces nothing.
"""

import json
import math
import statistics
from dataclasses import dataclass
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.plan.cost.interval import interval
from jaxtrain.plan.estimate import Estimate
from tools.benchmarks.published_rows import ROOT, Row, rows

RECORD = ROOT / "docs" / "measurements" / "predictions" / "published.jsonl"
NEAR = 0.2  # a prediction within 20 % of what was published
Line = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """A row beside its prediction."""

    row: Row
    line: Line

    @property
    def refused(self) -> str:
        """The reason why nothing is predicted of it; "" if something is."""
        return self.line.get("refused", "")

    @property
    def published(self) -> float:
        """The tokens a second and device that were published."""
        return self.row.tokens / self.row.seconds(self.line["flops"])

    @property
    def predicted(self) -> float:
        """The tokens a second and device that are predicted."""
        return self.row.tokens / self.line["seconds"]

    @property
    def error(self) -> float:
        """The share by which the prediction is too fast: 0.1 for a tenth."""
        return self.predicted / self.published - 1

    @property
    def inside(self) -> bool | None:
        """Whether the published step lies within the interval that a plan prints; None: it prints none."""
        found = interval(self.line["platform"], self.line["seconds"], self.line["experts"])
        return found and found[0] <= self.row.seconds(self.line["flops"]) <= found[1]


def recorded() -> dict[str, Line]:
    """Return the recorded predictions by question."""
    lines = map(json.loads, RECORD.read_text().splitlines()) if RECORD.exists() else ()
    return {line["question"]: line for line in lines}


def answers() -> list[Answer]:
    """Return all rows whose prediction is recorded."""
    known = recorded()
    return [Answer(row, known[row.question]) for row in rows() if row.question in known]


def predict(row: Row) -> Line:
    """Ask the planner for a row, and return the line to record."""
    line: Line = {"question": row.question, "row": row.name}
    try:
        guesses = row.predict()
    except UserError as error:
        return line | {"refused": f"{error}"}
    return line | {"platform": guesses[0].target.platform, "experts": guesses[0].config.model.experts.num,
                   "seconds": _mean(guess.seconds for guess in guesses), "parts": _parts(guesses),
                   "gb": round(max(guess.bytes for guess in guesses) / 1e9, 2),
                   "fits": all(guess.fits for guess in guesses), "flops": _flops(guesses[0])}


def write(known: dict[str, Line]) -> None:
    """Record predictions, in the order of the rows; those whose question no row asks any more are left out."""
    asked = dict.fromkeys(row.question for row in rows())
    RECORD.write_text("".join(json.dumps(known[one]) + "\n" for one in asked if one in known))


def _mean(found: Any) -> float:
    return float(f"{statistics.mean(found):.6g}")


def _parts(guesses: list[Estimate]) -> dict[str, float]:
    """Return the predicted seconds by what has one rate."""
    kinds = "matmul", "attention", "memory"
    parts = {kind: _mean(guess.time.parts[kind] for guess in guesses) for kind in kinds}
    rest = [sum(seconds for part, seconds in guess.time.parts.items() if part not in kinds) for guess in guesses]
    return parts | {"communication": _mean(rest)}


def _flops(guess: Estimate) -> float:
    """Return the FLOP of a token that the model needs, with attention counted as full, as others print them."""
    model, data = guess.config.model, guess.config.data
    tokens = data.global_batch_size * data.seq_len / guess.devices
    heads = model.num_layers * model.num_heads * model.head_dim
    return float(f"{guess.useful / tokens + 6 * heads * data.seq_len:.6g}")


def summary(found: list[Answer]) -> dict[str, float]:
    """Return how many predictions there are, their median error, and how many are near and within their interval."""
    errors = [abs(one.error) for one in found]
    judged = [one.inside for one in found if one.inside is not None]
    return {"rows": len(found), "median": statistics.median(errors), "bias": math.exp(statistics.median(
        math.log(1 + one.error) for one in found)) - 1, "near": sum(error <= NEAR for error in errors) / len(errors),
        "inside": sum(judged) / len(judged) if judged else math.nan}
