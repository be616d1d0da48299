"""Reading a metrics.jsonl that grows, is cut off, and is taken back."""

import json
import math

from jaxtrain.launch.sweep.metric_curve import MetricCurve


def test_a_curve_follows_its_file(tmp_path):
    def written(*lines, end="\n"):
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + end)
        curve.look()
        return curve.values

    curve = MetricCurve(tmp_path, "eval_loss")
    curve.look()
    assert (curve.steps, curve.at(9)) == (0, None)
    first = {"step": 1, "tokens": 5}, {"step": 1, "eval_loss": 3.0}, {"step": 2, "tokens": 10}
    assert written(*first) == {1: 3.0} and curve.steps == 2 and curve.tokens == {1: 5, 2: 10}
    assert curve.reached(1) and not curve.reached(2), "its evaluation may follow"
    assert written(*first, {"step": 2, "eval_loss": 2.0}, end="") == {1: 3.0}, "a line without an end is not a line yet"
    assert written(*first, {"step": 2, "eval_loss": 2.0}) == {1: 3.0, 2: 2.0} and curve.reached(2)
    assert math.isnan(written(*first, {"step": 2, "eval_loss": 2.0}, {"step": 3, "eval_loss": None})[3])
    assert (curve.at(1), curve.at(2)) == (3.0, 2.0) and math.isnan(curve.at(7))
    assert written(*first) == {1: 3.0} and curve.steps == 2, "a run that resumes takes lines back"
    again = {"step": 1, "tokens": 5}, {"step": 1, "eval_loss": 4.0}, {"step": 2, "tokens": 10, "step_time_s": 0.5}
    assert written(*again, {"step": 2, "eval_loss": 2.0}) == {1: 4.0, 2: 2.0}, "and writes more before anybody looks"
