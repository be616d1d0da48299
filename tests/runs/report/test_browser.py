"""The page in a real browser, Chromium, on a phone and a wide screen, in light and dark mode, and served."""

import json
import re
import shutil
import subprocess
import threading
from html import escape

import pytest

from jaxtrain.runs.report import live_page
from jaxtrain.runs.report.report_page import ReportPage
from tests.runs.report.recorded import BEGAN, recorded

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
# Turns every control, then tells what it sees. Tables may be wider than a phone: those scroll in a box of their own.
PROBE = """<script>setTimeout(() => {
  const first = () => document.querySelector("[data-chart=loss] .drawing")._fullData[0].x[1];
  const turned = [first()];
  for (const [id, key, value] of [["axis", "value", "hours"], ["smoothing", "value", 0], ["log", "checked", true]]) {
    document.getElementById(id)[key] = value;
    document.getElementById(id).dispatchEvent(new Event("input"));
    turned.push(first());
  }
  document.querySelectorAll("details").forEach(part => { part.open = true; });
  setTimeout(() => {
    const out = [...document.querySelectorAll("main *")].filter(one => !one.closest("[data-part]") &&
      !one.closest(".js-plotly-plot") && one.getBoundingClientRect().right > innerWidth + 1);
    console.info("SEEN " + JSON.stringify({width: innerWidth, scroll: document.documentElement.scrollWidth, turned,
      dark: matchMedia("(prefers-color-scheme: dark)").matches, out: out.map(one => one.outerHTML.slice(0, 80)),
      charts: document.querySelectorAll("[data-chart]").length,
      drawn: document.querySelectorAll(".js-plotly-plot").length,
      text: getComputedStyle(document.querySelector(".xtick text")).fill}));
  }, 2000);
}, 3000);</script>"""

# Zooms as a mouse does, and tells the range of the axis before, after, and when the page has renewed itself.
ZOOM = """<script>{
  const chart = () => document.querySelector("[data-chart=loss] .drawing"), ranges = [];
  const note = () => ranges.push(chart()._fullLayout.xaxis.range.map(x => Math.round(x)));
  const mouse = (kind, target, x) => { const box = chart().querySelector(".nsewdrag").getBoundingClientRect();
    target.dispatchEvent(new MouseEvent(kind, {bubbles: true, view: window, clientX: box.left + x * box.width,
      clientY: box.top + box.height / 2})); };
  setTimeout(note, 2000);
  setTimeout(() => mouse("mousedown", chart().querySelector(".nsewdrag"), 0.4), 2100);
  setTimeout(() => mouse("mousemove", document, 0.6), 2200);
  setTimeout(() => mouse("mouseup", document, 0.6), 2300);
  setTimeout(note, 3000);
  setTimeout(() => { note(); console.info("SEEN " + JSON.stringify(ranges)); }, 8500);
}</script>"""


def browsed(address, width, dark, shot=None):
    """The lines of the browser's console; `shot`: a drawing of the page."""
    words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--enable-logging=stderr", f"--window-size={max(width, 500)},2400",
             f"--blink-settings=preferredColorScheme={0 if dark else 1}",
             "--virtual-time-budget=9000", f"--screenshot={shot}" if shot else "--dump-dom", address]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    return re.findall(r"CONSOLE[^\]]*\] \"(.*?)\", source:", done.stderr, re.S), done.stdout


def looked(page, folder, width, dark):
    """Return what the probe sees of a page in a frame of this width, since a window has at least 500 pixels."""
    (folder / "page.html").write_text(page.replace("</body>", f"{PROBE}</body>"))
    (folder / "frame.html").write_text('<body style="margin:0"><iframe src="page.html" style="border:0;'
                                       f'width:{width}px;height:2400px"></iframe>')
    shot = folder / f"{width}-{'dark' if dark else 'light'}.png"
    console, _ = browsed(f"file://{folder}/frame.html", width, dark, shot)
    assert shot.stat().st_size > 30_000, "a blank drawing"
    seen = [line.removeprefix("SEEN ") for line in console if line.startswith("SEEN ")]
    return [line for line in console if not line.startswith("SEEN ")], json.loads(seen[0]) if seen else None


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    pwned = "</script><img src=x onerror=console.error('pwned')>"
    events = [{"time": BEGAN + 10 * n, "kind": ("checkpoint", "spike", "rollback", pwned)[n % 4], "step": n + 1,
               "why": f"{pwned} {'long' * 50}"} for n in range(30)]
    rough = recorded(folder / "rough", events=events, starts=3, bad=(5, 6),
                     overrides={"data.cache_dir": pwned + "x" * 200})
    seeds = [recorded(folder / f"seed-{n}", overrides={"train.seed": n}, shift=n / 10, events=events[:3])
             for n in range(3)]
    return {"one": ReportPage([rough]).render(), "several": ReportPage([*seeds, rough]).render()}


@pytest.mark.parametrize("name", ["one", "several"])
def test_it_is_drawn_without_an_error_and_fits(pages, tmp_path, name):
    """A phone in one mode, a wide screen in the other one; of several runs the other way round."""
    colours = set()
    for width, dark in ((360, name == "several"), (1440, name == "one")):
        console, seen = looked(pages[name], tmp_path, width, dark)
        assert console == [], "the console of the browser"
        assert (seen["width"], seen["scroll"], seen["out"], seen["dark"]) == (width, width, [], dark)
        assert seen["drawn"] == seen["charts"] > 8
        steps, hours, *_ = seen["turned"]
        assert steps == 2 and hours == pytest.approx(0.02)
        colours.add(seen["text"])
    assert len(colours) == 2, "text on charts has the colours of the mode"


def test_an_error_would_be_found(pages, tmp_path):
    """The test above can fail: by an error, by an attack, by what is too wide."""
    broken = pages["one"].replace("</body>", "<script>throw new Error('deliberate')</script></body>").replace(
        "</main>", '<img src=x onerror=console.error("pwned")><p style="width:50rem">wide</p>'
                   '<img src="http://127.0.0.1:9/x.png"></main>')
    console, seen = looked(broken, tmp_path, 360, False)
    for word in ("deliberate", "pwned"):
        assert any(word in line for line in console)
    assert seen["scroll"] > 360 and seen["out"]
    assert any("Content Security Policy" in line and "127.0.0.1:9" in line for line in console), "it may load nothing"


def served(page):
    """The lines of the browser's console and the document, of a page that is served."""
    server = live_page.server(page)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        return browsed(f"http://127.0.0.1:{server.server_address[1]}/", 1440, False)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_served_page_renews_itself(tmp_path):
    workdir = recorded(tmp_path / "run")
    page = ReportPage([workdir])
    render, asked = page.render, []

    def renewed(**keys):
        asked.append(keys)
        if keys["bare"]:
            (workdir / "events.jsonl").write_text(json.dumps({"time": BEGAN, "kind": "news<b>"}) + "\n")
            page.look()
        return render(**keys).replace("</body>", f"{ZOOM}</body>")

    page.render = renewed
    console, dom = served(page)
    before, zoomed, after = json.loads(console[0].removeprefix("SEEN "))
    assert len(console) == 1 and before != zoomed == after, "the zoom is kept"
    assert any(keys["bare"] for keys in asked) and escape("news<b>") in dom and "Renewed every 5 seconds" in dom


def test_a_page_served_before_the_first_step_gets_its_charts(tmp_path):
    workdir = recorded(tmp_path / "run")
    metrics = (workdir / "metrics.jsonl").rename(tmp_path / "later")
    page = ReportPage([workdir])
    render = page.render

    def renewed(**keys):
        if keys["bare"]:
            shutil.copy(metrics, workdir / "metrics.jsonl")
            page.look()
        return render(**keys)

    page.render = renewed
    console, dom = served(page)
    assert console == [] and 'data-chart="loss"' in dom and "No steps yet" not in dom
