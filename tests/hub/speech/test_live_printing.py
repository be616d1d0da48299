"""Lines of transcripts that grow."""

from types import SimpleNamespace

import pytest

from jaxtrain.hub.speech import live_printing
from jaxtrain.hub.speech.live_transcript import Said
from jaxtrain.hub.speech.transcript_windows import Segment

TWO = [Segment(0, 1, "one two")]


@pytest.mark.parametrize(("said", "printed"), [
    ([Said("one"), Said("one two", TWO)], "one two\n"),
    ([Said("one", TWO), Said("", []), Said("three"), Said("three", TWO)], "one\nthree\n"),  # a window of silence
    ([Said("one tree"), Said("one two", TWO), Said("a", TWO)], "one tree\ncorrected: one two\na\n"),
    ([Said("one"), Said("", [])], "one\ncorrected: \n"), ([], ""),
])
def test_words_are_added_to_a_line_and_corrected_in_another(said, printed, monkeypatch, capsys):
    monkeypatch.setattr(live_printing, "LiveTranscript", lambda model: SimpleNamespace(of=lambda blocks: said))
    found = live_printing.print_live(None, [("a", ())])
    assert capsys.readouterr().out == printed
    assert found == {"a": [segment for one in said for segment in one.segments or ()]}


def test_each_word_is_printed_when_it_comes(monkeypatch, capsys):
    def of(blocks):
        for n, text in enumerate(["one", "one two", "one two three"]):
            yield Said(text)
            assert capsys.readouterr().out == ("b\tone", " two", " three")[n]
        yield Said(text, TWO)

    monkeypatch.setattr(live_printing, "LiveTranscript", lambda model: SimpleNamespace(of=of))
    live_printing.print_live(None, [("b", ())], named=True)
    assert capsys.readouterr().out == "\n"


def test_the_name_is_in_front_of_a_corrected_line_too(monkeypatch, capsys):
    monkeypatch.setattr(live_printing, "LiveTranscript", lambda model: SimpleNamespace(of=lambda blocks: blocks))
    live_printing.print_live(None, [("a", [Said("one tree"), Said("one two", TWO)])], named=True)
    assert capsys.readouterr().out == "a\tone tree\na\tcorrected: one two\n"
