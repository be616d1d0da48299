"""JSON that commands print has full precision, and is valid to every reader."""

from jaxtrain.base.json_output import tell_json


def test_numbers_are_whole_and_valid(capsys):
    tell_json({"a": 0.1 + 0.2, "b": float("nan"), "c": [float("-inf"), (1, "\x1b[2J")], 3: None})
    assert capsys.readouterr().out == (
        '{"a": 0.30000000000000004, "b": null, "c": [null, [1, "\\u001b[2J"]], "3": null}\n')
