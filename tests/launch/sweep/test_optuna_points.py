"""Points by Optuna, which follow from the seed and from what is shown."""

import pytest

from jaxtrain.launch.sweep.metric_curve import MetricCurve
from jaxtrain.launch.sweep.trials import Trial, Tried
from tests.launch.sweep.simulated import RATE, Machine, described

pytest.importorskip("optuna")
pytestmark = pytest.mark.slow  # Optuna takes a second to import


def tried(sweep, values):
    """Points of a random search, which were complete with these values, or failed with None."""
    return [Tried(n, keys, (), "complete" if value is not None else "failed", value)
            for n, (keys, value) in enumerate(zip(sweep.points(), values, strict=False))]


def drawn(tmp_path, shown, count=1, **said):
    from jaxtrain.launch.sweep.optuna_points import draw

    sweep, points = described(Machine(tmp_path), method="tpe", **said), [*shown]
    for _ in range(count):
        if (found := draw(sweep, points, len(points))) is None:
            break
        points.append(Tried(len(points), found[0], (), "complete", 1.0))
    return [point.keys for point in points[len(shown):]]


def test_the_seed_and_the_number_make_the_point(tmp_path):
    first = drawn(tmp_path, [], 3)
    assert first == drawn(tmp_path, [], 3) and len({point[RATE] for point in first}) == 3
    assert first != drawn(tmp_path, [], 3, seed=2)


def test_it_goes_where_results_are_good_and_nothing_failed(tmp_path):
    sweep = described(Machine(tmp_path), budget={"trials": 40})
    good = [point[RATE] if point[RATE] > 0.1 else None for point in sweep.points()]
    found = drawn(tmp_path, tried(sweep, good), 12)
    assert sum(point[RATE] > 0.1 for point in found) >= 9, "a quarter of all lies there"
    low = [point[RATE] for point in sweep.points()]
    assert sum(point[RATE] < 0.01 for point in drawn(tmp_path, tried(sweep, low), 12)) >= 9
    above = drawn(tmp_path, tried(sweep, low), 12, objective={"goal": "maximise"})
    assert sum(point[RATE] > 0.01 for point in above) >= 9


def test_a_pruner_sees_values_in_their_order(tmp_path):
    """A trial that was bad at first stops, even if somebody looks when it has become good."""
    from jaxtrain.launch.sweep.optuna_points import stopped

    sweep = described(Machine(tmp_path), stop={"pruner": "median", "n_startup_trials": 2})
    shown = []
    for number, keys in enumerate(sweep.points()[:4]):
        trial = Trial(tmp_path, number, keys, None, 10, MetricCurve(tmp_path / "none", "eval_loss"))
        trial.curve.values = {step: 1.0 if number < 3 else 5.0 if step < 6 else 0.0 for step in range(1, 11)}
        shown.append(Tried(number, keys, [trial], "complete" if number < 3 else "", 1.0 if number < 3 else None))
    assert stopped(sweep, shown, shown[3]) and shown[3].trials[0].sampler["reported"] == 1
    shown[3].trials[0].curve.values, shown[3].trials[0].sampler = dict.fromkeys(range(1, 11), 0.5), {}
    assert not stopped(sweep, shown, shown[3]) and shown[3].trials[0].sampler["reported"] == 10


def test_no_point_is_drawn_twice(tmp_path):
    keys = {RATE: [0.1, 0.2], "model.num_layers": {"low": 1, "high": 3, "int": True}}
    found = drawn(tmp_path, [], 20, keys=keys)
    assert len(found) == 6 == len({repr(point) for point in found})
