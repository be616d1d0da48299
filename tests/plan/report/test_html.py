"""The page of a plan: it parses, says all that the search found, and what it draws is as long as the numbers say."""

from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.plan import targets
from jaxtrain.plan.__main__ import main
from jaxtrain.plan.estimate import change, estimate
from jaxtrain.plan.report import device_drawing, html, scaling
from jaxtrain.plan.report.table import Choice, Found, shown

VOID = {"meta"}
TITLE = '<script>alert("1 & 2")</script>'
LAYOUTS = [{"mesh.data": 1, "mesh.fsdp": 8, "train.remat": "full"},
           {"mesh.data": 2, "mesh.fsdp": 4, "train.remat": "full", "optimizer.zero_stage": 1},
           {"mesh.data": 8, "mesh.fsdp": 1, "train.remat": "none"}]


class Page(HTMLParser):
    """What a browser would make of it: every element with its attributes, and all text by the element it is in."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))


@pytest.fixture(scope="module")
def found():
    """Two layouts that fit, one that does not, and one that was not looked at."""
    config = jt.load_config("configs/llama3_8b.py:tiny", {"data.global_batch_size": 64})
    guesses = [estimate(change(config, keys), targets.TARGETS["h100"], 8) for keys in LAYOUTS]
    middle, most = sorted(guess.bytes for guess in guesses)[1:]
    target = replace(targets.TARGETS["h100"], memory=(middle + most) / 2 / 0.92)
    found = Found(config, target, 8, refused=[({"mesh.data": 4, "mesh.tensor": 2}, "a < b")])
    for keys, guess in zip(LAYOUTS, guesses, strict=True):
        found.add(Choice(keys, replace(guess, target=target)))
    found.sort()
    return found


@pytest.fixture(scope="module")
def series(found):
    return scaling.scaled(found)


@pytest.fixture(scope="module")
def page(found, series):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "scaled", lambda found: series)
        return Page(html.page(found, TITLE))


def texts(page, *tags):
    return [text for tag, text in page.texts if not tags or tag in tags]


def test_it_parses_needs_nothing_else_and_escapes_what_users_write(page):
    assert {tag for tag, _ in page.elements} >= {"table", "svg", "rect", "h1"}
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.elements}
    assert not any(name in ("src", "href") for _, attributes in page.elements for name in attributes)
    assert texts(page, "h1") == [f"{TITLE} on 8 × h100"]
    assert "a < b" in texts(page, "td")


def test_all_layouts_and_parts_appear(page, found):
    assert len(found.fitting) == 2 and len(found.too_large) == 1
    cells = texts(page, "td")
    for choice in (*found.fitting, *found.too_large):
        assert f"{choice}" in cells
        drawn = {attributes["data-part"] for _, attributes in page.elements if "data-part" in attributes}
        assert drawn >= {name for name, size in choice.estimate.memory.items() if size > 0}
        if choice.estimate.fits:
            assert drawn >= set(choice.estimate.time.parts)
    assert found.why(found.too_large[0]) in cells
    assert shown(found.refused[0][0]) in cells
    assert f"{found.best.estimate.mfu:.1%}" in cells


def test_bars_are_as_long_as_the_numbers(page, found):
    bars, unit = [], 0.0
    for tag, attributes in page.elements:
        if tag == "svg":
            unit = float(attributes.get("data-per-pixel", 0))
        elif tag == "g":
            bars.append(Counter())
        elif "data-part" in attributes:
            bars[-1][attributes["data-part"]] += float(attributes["width"]) * unit
        elif "data-limit" in attributes:
            assert float(attributes["d"][1:].split()[0]) * unit == pytest.approx(float(attributes["data-limit"]), 1e-4)
    wanted = [*(choice.estimate.memory for choice in (*found.fitting, *found.too_large)),
              *(choice.estimate.time.parts for choice in found.fitting)]
    assert len(bars) == len(wanted)
    for bar, parts in zip(bars, wanted, strict=True):
        assert bar.total() == pytest.approx(parts.total(), 1e-4)
        assert set(bar) == {name for name, size in parts.items() if size > 0}
    limits = [attributes["data-limit"] for _, attributes in page.elements if "data-limit" in attributes]
    assert [*map(float, limits)] == [found.target.room, found.target.memory]


def test_segments_lie_end_to_end():
    svg = Page(device_drawing.bars([("one", Counter(a=3.0, b=2.0, c=-1.0))], "GB", 1.0, []))
    rects = [attributes for tag, attributes in svg.elements if tag == "rect" and "data-part" in attributes]
    assert [(rect["data-part"], float(rect["x"]), float(rect["width"])) for rect in rects] == [
        ("a", 0.0, 350.0), ("b", 350.0, 350.0)]  # what is below nothing is taken from the largest


def test_other_numbers_of_devices(found, series):
    assert [point.devices for point in series[scaling.ALONG]] == [2, 4, 8, 16, 32]
    assert [point.batch for point in series[scaling.ALONG]] == [16, 32, 64, 128, 256]
    for points in series.values():
        for point in points:
            assert (point.choice is None) == bool(point.why)
            if point.choice:
                guess = point.choice.estimate
                assert guess.fits and guess.devices == point.devices
                assert guess.config.data.global_batch_size == point.batch
        assert points[2].choice is found.best


def test_where_nothing_fits_it_says_why(found):
    nothing = Found(found.config, found.target, 8, too_large=found.too_large)
    page = Page(html.page(nothing, "large"))
    assert found.why(found.too_large[0]) in texts(page, "td") and "None." in texts(page, "p")


def test_a_file_that_cannot_be_written(found, tmp_path):
    for path in (tmp_path, tmp_path / "no" / "page.html"):
        with pytest.raises(UserError, match=r"--html: .* cannot be written"):
            html.write(found, path, "one")


@pytest.mark.slow
def test_command(tmp_path, capsys):
    words = ["--config=configs/llama3_8b.py:tiny", "--target=h100", f"--html={tmp_path / 'page.html'}"]
    assert main(words) == 0
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert texts(page, "h1") == ["configs/llama3_8b.py:tiny on 1 × h100"]
    assert main([*words, "--explain"]) == 2
    assert "--explain covers only one layout" in capsys.readouterr().err
