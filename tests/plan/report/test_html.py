"""The page of a plan: it parses, says all that the search found, and what it draws is as long as the numbers say."""

import shlex
from collections import Counter
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

import jaxtrain as jt
from jaxtrain.commands.flags import overrides_of
from jaxtrain.commands.plan import main
from jaxtrain.config.load import make_config
from jaxtrain.errors import UserError
from jaxtrain.pages import style
from jaxtrain.plan import search, targets
from jaxtrain.plan.estimate import change, estimate
from jaxtrain.plan.report import bars, html, scaling, table
from jaxtrain.plan.report.html import command
from jaxtrain.plan.report.reasons import duration, reasons
from jaxtrain.plan.report.table import Choice, Found, shown

pytestmark = pytest.mark.slow  # one search for all of them
VOID = {"meta"}
SOURCE = "configs/llama3_8b.py:tiny"
TITLE = '<script>alert("1 & 2")</script>'
LAYOUTS = [{"mesh.data": 1, "mesh.fsdp": 8, "train.remat": "full"},
           {"mesh.data": 2, "mesh.fsdp": 4, "train.remat": "full", "optimizer.zero_stage": 1},
           {"mesh.data": 8, "mesh.fsdp": 1, "train.remat": "none"}]


class Page(HTMLParser):
    """The page as a browser sees it: every element with its attributes, and all text by the element it is in."""

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
    config = jt.load_config(SOURCE, {"data.global_batch_size": 64})
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
def base():
    return jt.load_config(SOURCE)


@pytest.fixture(scope="module")
def page(found, series, base):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "scaled", lambda found: series)
        return Page(html.page(found, TITLE, base))


def texts(page, *tags):
    return [text for tag, text in page.texts if not tags or tag in tags]


def attributes_of(page, name):
    """Attributes of the elements that have this one, in order."""
    return [attributes for _, attributes in page.elements if name in attributes]


def test_it_parses_needs_nothing_else_and_escapes_what_users_write(page):
    assert {tag for tag, _ in page.elements} >= {"table", "svg", "figure", "h1"}
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.elements}
    assert not any(name in ("src", "href") for _, attributes in page.elements for name in attributes)
    assert "url(" not in style.STYLE and "@import" not in style.STYLE
    assert texts(page, "h1") == [f"Training plan: {Path(TITLE).stem} on 8 × h100"]
    assert "a < b" in texts(page, "td")


def test_it_adapts_to_phones_and_to_dark_mode(page):
    assert {"name": "viewport", "content": "width=device-width,initial-scale=1"} in attributes_of(page, "content")
    assert "prefers-color-scheme:dark" in style.STYLE
    labels = {attributes["data-head"] for attributes in attributes_of(page, "data-head")}
    assert labels >= {"memory, GB", "step", "computation", "exposed", "hidden", "tokens/s", "MFU"}


def test_the_command_trains_with_the_first_layout(page, found, base):
    (shown_,) = texts(page, "pre")
    assert shown_ == command(found.best, TITLE, base)
    assert shlex.split(shown_)[:4] == ["python", "-m", "jaxtrain.main", f"--config={TITLE}"]
    overrides = overrides_of(shlex.split(shown_)[4:], ())
    assert "data.global_batch_size" in overrides  # given to the planner, and no key of a layout
    assert jt.load_config(SOURCE, overrides) == found.best.estimate.config


def test_a_command_for_a_config_whose_mesh_was_chosen(found):
    searched = jt.load_config(SOURCE, {"mesh": "auto"})
    guess = replace(found.best.estimate, config=change(searched, {**LAYOUTS[1], "mesh.auto": False}))
    words = shlex.split(command(Choice(LAYOUTS[1], guess), "tiny.json", searched))
    assert make_config(searched.to_dict(), overrides_of(words[4:], ())) == guess.config


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


def charts(page):
    """Return the bars of every chart: solid parts and hidden parts, with their amounts and widths."""
    found = []
    for tag, attributes in page.elements:
        if attributes.get("class") == "chart":
            found.append([])
        elif attributes.get("class") == "stack":
            found[-1].append((Counter(), Counter(), Counter()))
        elif "data-part" in attributes:
            solid, hidden, widths = found[-1][-1]
            drawn = hidden if "hatched" in attributes["class"] else solid
            drawn[attributes["data-part"]] += float(attributes["data-value"])
            widths[attributes["data-part"]] += float(attributes["style"].partition("%")[0].removeprefix("width:"))
            assert attributes["title"].startswith(f"{attributes['data-part']}: ")
    return found


def test_bars_add_up_to_the_numbers_of_the_tables(page, found):
    times, talks, memories = charts(page)
    for choice, (solid, hidden, _), (exposed, as_hidden, _) in zip(found.fitting, times, talks, strict=True):
        time = choice.estimate.time
        assert solid.total() == pytest.approx(choice.estimate.seconds)
        assert hidden == +time.hidden == as_hidden
        assert exposed.total() == pytest.approx(sum(s for name, s in time.parts.items() if " over " in name))
        cells = texts(page, "td")
        assert {duration(solid.total()), duration(exposed.total()), duration(hidden.total())} <= set(cells)
        assert duration(solid.total() - exposed.total()) in cells
    assert any(exposed for exposed, _, _ in talks) and any(hidden for _, hidden, _ in talks)
    drawn = [*found.fitting, *found.too_large]
    longest = max(found.target.memory, *(choice.estimate.bytes for choice in drawn))
    for choice, (solid, _, widths) in zip(drawn, memories, strict=True):
        assert solid.total() == choice.estimate.bytes
        assert widths.total() == pytest.approx(100 * choice.estimate.bytes / longest, abs=0.01)
    limits = [(float(mark["data-limit"]), mark["style"]) for mark in attributes_of(page, "data-limit")[:2]]
    assert limits == [(limit, f"left:{limit / longest:.4%}") for limit in (found.target.room, found.target.memory)]


def test_each_part_is_named_and_each_bar_has_a_text_alternative(page, found):
    legend = set(texts(page, "li"))
    assert legend >= {part["data-part"] for part in attributes_of(page, "data-part")}
    said = [attributes["aria-label"] for attributes in attributes_of(page, "role") if attributes["role"] == "img"]
    best = found.best.estimate
    assert said[0].startswith(f"{found.best}: {duration(best.seconds)}, of which ")
    for part, seconds in [*(+best.time.parts).items()]:
        assert f"{part} {duration(seconds)}" in said[0]
    for part, seconds in [*(+best.time.hidden).items()]:
        assert f"{part} {duration(seconds)}" in said[0].partition("; hidden: ")[2]
    assert len(said) == 2 * len(found.fitting) + len(found.fitting) + len(found.too_large) + 2  # and two of lines


def test_parts_are_never_drawn_below_nothing():
    assert bars.positive(Counter(a=3.0, b=2.0, c=-1.0)) == Counter(a=2.0, b=2.0)  # taken from the largest
    assert bars.positive(Counter()) == Counter()


def test_why_the_first_wins(page, found):
    first, second = (choice.estimate for choice in found.fitting)
    against, memory = reasons(found)[:2]
    assert {against, memory} <= set(texts(page, "li"))
    assert f"{found.fitting[1]}, takes {second.seconds / first.seconds - 1:.1%} longer" in against
    part, more = max(((part, seconds - first.time.parts[part]) for part, seconds in second.time.parts.items()),
                     key=lambda one: one[1])
    assert f"it pays {duration(more)} more for {part}" in against
    assert memory.startswith(f"It uses {first.bytes / 1e9:.2g}")
    alone = Found(found.config, found.target, 8, fitting=found.fitting[:1])
    assert reasons(alone)[0] == "No other layout that was traced fits."


def test_the_faster_ones_that_do_not_fit_are_named(found):
    small = replace(found, fitting=found.fitting[1:], too_large=found.fitting[:1])
    took = duration(found.best.estimate.seconds)
    assert f"the fastest of these, {found.best}, would take {took}" in reasons(small)[-1]


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
    page = Page(html.page(nothing, "large", found.config))
    assert found.why(found.too_large[0]) in texts(page, "td") and "None." in texts(page, "p")


def test_a_notebook_shows_the_same_with_the_keys_in_place_of_a_command(found, monkeypatch):
    monkeypatch.setattr(search, "search", lambda *_, **__: found)
    plan = jt.plan(found.config, "h100x8")
    assert f"{plan}" == f"{found}" and plan.best is found.best
    shown = plan._repr_html_()
    assert shown.startswith('<div class="jaxtrain">') and "python -m" not in shown and "a &lt; b" not in shown
    assert escape(table.keys(found, found.best)) in shown and "Where the memory of a device goes" in shown


def test_a_file_that_cannot_be_written(found, tmp_path):
    for path in (tmp_path, tmp_path / "no" / "page.html"):
        with pytest.raises(UserError, match=r"--output: .* cannot be written"):
            html.write(found, path, SOURCE)


def test_command(tmp_path, capsys):
    words = ["--config=configs/llama3_8b.py:tiny", "--target=h100", f"--output={tmp_path / 'page.html'}"]
    assert main(words) == 0
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert texts(page, "h1") == ["Training plan: llama3_8b (tiny) on 1 × h100"]
    assert main([*words, "--explain"]) == 2
    assert "--explain covers only one layout" in capsys.readouterr().err


def test_what_answers_take_has_bars_of_its_own(found):
    answering = {"decoding": Counter({"key-value cache": 7, "parameters": 5})}
    best = Choice(found.best.overrides, replace(found.best.estimate, answering=answering))
    learning = replace(found, fitting=[best])
    text = html.page(learning, SOURCE, found.config)
    assert f"{best}, answering (decoding)" in text and 'data-part="key-value cache" data-value="7"' in text
