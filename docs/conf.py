"""Builds README.md, docs/ and the notebooks of examples/ into a site. Needs `pip install -e '.[docs]'`, and no network.

    python -m sphinx -W -c docs . build/site

then open build/site/docs/index.html. `-W`: a warning, such as a link to nowhere, is an error.
"""

import sys
from pathlib import Path

from pygments.lexers.special import TextLexer

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tools, which are not installed
from tools.release import executed_pages

project = "jaxtrain"
author = "the authors of jaxtrain"
root_doc = "docs/index"
include_patterns = ["docs/**.md", "examples/**.ipynb"]
exclude_patterns = [".*", "build", "dist", "runs", "corpora", "results", "configs", "deploy", "jaxtrain", "tests",
                    "tools", "*.egg-info"]  # folders that need not be looked through
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

html_theme = "sphinx_book_theme"
html_title = "jaxtrain"
html_theme_options = {"show_toc_level": 2}
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]

myst_heading_anchors = 3
nb_execution_mode = "off"  # tests/test_examples.py executes them

default_role = "code"  # docstrings write `code` between single backquotes
autodoc_member_order = "groupwise"
autodoc_default_options = {"members": True, "imported-members": True}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True


def say_when_executed(app, page, template, context, doctree):
    """Put below each page when its commands and code were last executed."""
    path = Path(app.srcdir, page)
    if path.with_suffix(".ipynb").is_file():
        said = executed_pages.notebook_sentence(path.with_suffix(".ipynb"))
    elif (text := path.with_suffix(".md")).is_file():
        said = executed_pages.sentence(f"{page}.md", text.read_text(), executed_pages.recorded())
    else:
        return
    context["body"] += f'<p class="executed"><small>{said}</small></p>'


def setup(app):
    """Leave out the docstring of the package, whose example the page itself has; show CSV as plain text."""
    def leave_out(app, what, name, obj, options, lines):
        if what == "module":
            lines.clear()

    app.add_lexer("csv", TextLexer)
    app.connect("autodoc-process-docstring", leave_out)
    app.connect("html-page-context", say_when_executed)
