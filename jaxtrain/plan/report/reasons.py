"""Say in sentences why the first layout of a search wins, from the numbers of the search alone."""

from collections.abc import Iterator

from jaxtrain.plan.estimate import Estimate
from jaxtrain.plan.report.table import Choice, Found, many
from jaxtrain.plan.targets import gigabytes

SAID, SMALL = 3, 0.05  # parts named at most; a part below this share of the whole difference is not named


def reasons(found: Found) -> list[str]:
    """Return sentences: against the runner-up, against the best of another mesh, memory, and what does not fit."""
    best = found.best
    if best is None:
        return []
    others = found.fitting[1:]
    elsewhere = next((choice for choice in others if choice.mesh != best.mesh), None)
    said = [_compared(f"The runner-up, {others[0]},", best.estimate, others[0].estimate)] if others else [
        "No other layout that was traced fits."]
    if elsewhere and elsewhere is not others[0]:
        said.append(_compared(f"The fastest on another mesh, {elsewhere},", best.estimate, elsewhere.estimate))
    return [*said, *_memory(found, best), *_too_large(found, best)]


def duration(seconds: float) -> str:
    """Format a time in s, ms or µs with three digits."""
    scale, unit = next(((scale, unit) for scale, unit in ((1, "s"), (1e-3, "ms")) if seconds >= scale), (1e-6, "µs"))
    amount = seconds / scale
    return f"{amount:,.0f} {unit}" if amount >= 99.95 else f"{amount:#.3g} {unit}"


def _compared(name: str, best: Estimate, other: Estimate) -> str:
    difference: dict[str, float] = {
        part: other.time.parts[part] - best.time.parts[part]
                  for part in (*best.time.parts, *other.time.parts)}
    more, less = _largest(difference), _largest({part: -seconds for part, seconds in difference.items()})
    slower = other.seconds / best.seconds - 1
    text = (f"{name} takes {slower:.1%} longer ({duration(other.seconds)} instead of {duration(best.seconds)})"
            if slower >= 5e-4 else f"{name} takes practically as long ({duration(other.seconds)})")
    if more:
        text += f": it pays {_listed([f'{duration(s)} more for {part}' for part, s in more])}"
    if less:
        text += (", but" if more else ": it") + f" saves {_listed([f'{duration(s)} of {part}' for part, s in less])}"
    saved = best.bytes - other.bytes
    return f"{text}. It takes {gigabytes(abs(saved))} GB {'less' if saved > 0 else 'more'} memory."


def _largest(differences: dict[str, float]) -> list[tuple[str, float]]:
    """Return the largest positive differences, without those that matter little."""
    positive = sorted(((part, s) for part, s in differences.items() if s > 0), key=lambda one: -one[1])
    least = SMALL * sum(abs(seconds) for seconds in differences.values())
    return [(part, seconds) for part, seconds in positive if seconds > least][:SAID]


def _memory(found: Found, best: Choice) -> Iterator[str]:
    room, size = found.target.room, best.estimate.bytes
    yield (f"It uses {gigabytes(size)} of the {gigabytes(room)} GB that a program may use ({size / room:.0%}).")
    smallest = min(found.fitting, key=lambda choice: choice.estimate.bytes)
    if smallest is not best:
        slower = smallest.estimate.seconds / best.estimate.seconds - 1
        yield (f"The smallest that fits, {smallest}, uses {gigabytes(smallest.estimate.bytes)} GB and takes "
               f"{slower:.1%} longer.")


def _too_large(found: Found, best: Choice) -> Iterator[str]:
    faster = [choice for choice in found.too_large if choice.estimate.seconds < best.estimate.seconds]
    if faster:
        first = min(faster, key=lambda choice: choice.estimate.seconds)
        yield (f"{many(len(faster), 'layout', 'layouts')} would be faster if there were memory for it; the fastest of "
               f"these, {first}, would take {duration(first.estimate.seconds)} ({found.why(first)}).")


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
