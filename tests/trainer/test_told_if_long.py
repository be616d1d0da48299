"""Messages about compiling that takes long."""

import threading

import pytest

from jaxtrain.trainer import reporting


@pytest.mark.parametrize("long", [True, False])
def test_long_compiling_is_told_when_it_begins_and_when_it_ends(long, monkeypatch):
    said, told = [], threading.Event()

    def say(text):
        said.append(text)
        told.set()

    monkeypatch.setattr(reporting, "say", say)
    monkeypatch.setattr(reporting, "_SILENT", 0.0 if long else 600.0)
    with reporting.told_if_long():
        assert not long or told.wait(60)
    assert [text.split(" in ")[0] for text in said] == [
        "compiling the step, which takes minutes for large models", "compiled the step"] * long
