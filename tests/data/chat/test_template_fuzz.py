"""Hostile chat templates: each is rendered within bounds, leaves its record out, or is refused in one line."""

import random
from pathlib import Path

from jaxtrain.data import load_tokenizer
from jaxtrain.data.chat import template_limits
from jaxtrain.data.chat.templates import Chat
from jaxtrain.data.formats.conversations import Example
from jaxtrain.errors import UserError
from tests import fuzzing

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
SECONDS = 0.2  # of processor time, so that what never ends is quick to refuse
HUGE = ("5000000000", "99999999", "2 ** 40", "9 ** 60", "70000000", "123456")
SMALL = ("'a'", "'ab' * 3", "messages", "messages[0].content", "range(9)", "[1, [2]]", "{'a': 1}", "7", "1.5", "none")
METHODS = ("ljust", "rjust", "center", "zfill", "expandtabs")
FILTERS = ("center", "indent", "wordwrap", "truncate", "batch", "slice", "round", "tojson", "format", "string",
           "list", "join", "reverse", "sort", "unique", "upper", "urlize", "wordcount", "replace", "xmlattr", "pprint",
           "groupby", "map", "sum", "filesizeformat", "int", "float", "random", "striptags", "forceescape", "attr")
CHAINS = ("not ", "(", "[", "-", "x if x else ", "a.", "{'a':", "a ~ ", "a and ", "f(")


def expression(rng: random.Random, depth: int = 3) -> str:
    """Return an expression that may take much."""
    if depth == 0:
        return rng.choice(SMALL)
    inner, huge = expression(rng, depth - 1), rng.choice(HUGE)
    return rng.choice([
        lambda: f"({inner}).{rng.choice(METHODS)}({huge})",
        lambda: f"({inner}) | {rng.choice(FILTERS)}",
        lambda: f"({inner}) | {rng.choice(FILTERS)}({rng.choice([huge, *SMALL])})",
        lambda: f"({inner}) {rng.choice(['*', '+', '**', '%', '//', '~', 'in', '=='])} ({rng.choice([huge, *SMALL])})",
        lambda: f"'{{:{rng.choice(['', '>', '.'])}{huge}}}'.format({inner})",
        lambda: f"'%{huge}{rng.choice('dsf')}' {rng.choice(['%', '| format'])} ({inner})",
        lambda: f"({inner}).{rng.choice(['replace', 'split', 'join', 'format', 'items', '__class__', 'mro'])}({huge})",
        lambda: f"range({huge}) | {rng.choice(FILTERS)}",
        lambda: f"dict(({inner}).items(), **{{'a': {inner}}})",
        lambda: f"namespace(a={inner}).a", lambda: f"({inner})[:{huge}:{rng.choice([1, -1])}]",
    ])()


def statement(rng: random.Random) -> str:
    """Return a piece of a template."""
    one, times = expression(rng), rng.choice([1, 30, 70, 99999, 10**9])
    grow = rng.choice(["n.x + n.x", "n.x ~ n.x", "n.x * n.x", "[n.x, n.x]", "{'a': n.x, 'b': n.x}",
                       "n.x | list + [n.x]", "n.x | join(n.x | string)", "(n.x | string).replace('a', 'aa')",
                       "[n.x, n.x] | sum(start=n.x)"])
    chain = rng.choice(CHAINS) * rng.choice([10, 300, 3000, 100_000])
    depth = rng.choice([5, 25, 120, 4000])
    return rng.choice([
        lambda: f"{{{{ {one} }}}}",
        lambda: f"{{% for i in range({times}) %}}{{{{ {one} }}}}{{% endfor %}}",
        lambda: f"{{% set n = namespace(x={rng.choice(SMALL)}) %}}{{% for _ in range({times}) %}}"
                f"{{% set n.x = {grow} %}}{{% endfor %}}{{{{ n.x | {rng.choice(FILTERS)} }}}}",
        lambda: f"{{% macro f(n) %}}{{{{ f(n) }}}}{rng.choice(['', '{{ f(n) }}'])}{{% endmacro %}}{{{{ f(1) }}}}",
        lambda: f"{{% for m in [messages] recursive %}}{{{{ loop({rng.choice(['m', '[m]', '[m, m]'])}) }}}}"
                "{% endfor %}",
        lambda: f"{{{{ {chain} 1 }}}}",
        lambda: "{% if x %}" * depth + "{% endif %}" * depth,
        lambda: "{% for i in 'ab' %}" * depth + "x" + "{% endfor %}" * depth,
        lambda: f"{{{{ 1 {'| string' * depth} }}}}",
        lambda: "{{ '" + rng.choice(["a", "{% ", "\\x00", "\U0001f600"]) * (depth * 300) + "' }}",
        lambda: f"{{% set ns = namespace() %}}{{% set ns.a = ns %}}{{{{ ns | {rng.choice(FILTERS)} }}}}",
        lambda: f"{{{{ raise_exception({one}) }}}}",
        lambda: "{% set l = [1] %}{% set d = {'a': l} %}{{ d.update({'b': d}) }}{{ d | tojson }}",
        lambda: f"{{{{ cycler.__init__.__globals__ }}}}{{{{ self._TemplateReference__context }}}}{{{{ {one} }}}}",
        lambda: "{% generation %}" * rng.choice([1, 50]) + f"{{{{ {one} }}}}" + "{% endgeneration %}",
        lambda: f"{{% filter {rng.choice(FILTERS)} %}}{{{{ {one} }}}}{{% endfilter %}}",
    ])()


def case(rng: random.Random, folder: Path) -> str:
    """Encode a conversation by a drawn template."""
    path = folder / "hostile.jinja"
    path.write_text("".join(statement(rng) for _ in range(rng.choice([1, 1, 2, 3]))))
    try:
        found, = Chat(load_tokenizer("bytes"), str(path), rng.choice(["assistant", "last", "all"])).encode_many(
            [Example([], [TALK], None).to_bytes()])
    except UserError as mistake:
        text = f"{mistake}"
        assert text.isprintable() and len(text) < 1000 and text.startswith("--chat_template: "), text[:1000]
        assert "hostile.jinja" in text, text
        return "refused"
    if isinstance(found, str):
        assert len(found) < 300, found
        return "dropped"
    return "rendered"


def test_hostile_templates_end(tmp_path, monkeypatch):
    monkeypatch.setattr(template_limits, "SECONDS", SECONDS)
    outcomes = fuzzing.run(case, range(40), tmp_path)
    assert {"refused", "dropped", "rendered"} == outcomes.keys()


if __name__ == "__main__":
    template_limits.SECONDS = SECONDS
    fuzzing.main(case)
