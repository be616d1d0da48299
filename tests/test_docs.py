"""The documentation builds into a site, without a warning and without the network."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import jaxtrain as jt

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("sphinx", "myst_nb", "sphinx_book_theme"))),
                    reason="needs pip install -e '.[docs]'")
def test_the_site_builds(tmp_path):
    (command,) = re.findall(r"^    python (-m sphinx .*)$", (ROOT / "docs/conf.py").read_text(), re.M)
    site = tmp_path / "site"
    words = shlex.split(command.replace("build/site", str(site)))
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    sources = [*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.ipynb")]
    assert len(sources) > 20 and {path.relative_to(ROOT).with_suffix("") for path in sources} <= pages
    reference = (site / "docs/api.html").read_text()
    missing = [name for name in [*jt.__all__, "Run.step", "TrainStep.init"] if f'id="jaxtrain.{name}"' not in reference]
    assert not missing, "the Python reference leaves out what jaxtrain.__all__ has"
    loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]*)"', reference)
    assert not loaded, "a page needs the network to be read"
