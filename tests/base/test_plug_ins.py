"""Parts of other packages: what is refused, with the names of the packages, and that nobody pays who has none."""

import subprocess
import sys
from importlib import metadata

import pytest

import jaxtrain as jt
from jaxtrain.base import plug_ins
from jaxtrain.base.plug_ins import Kind
from jaxtrain.config import key_reference, part_tables
from jaxtrain.config.sections import plug_in_sections
from tests.plug_in_package import importable, install

SOURCE = '''
from dataclasses import dataclass

@dataclass(frozen=True)
class Steps:
    """Steps: a constant."""

    height: float = 1.0  # of the steps

    def __call__(self, c, steps):
        return lambda step: c.learning_rate * self.height

def plain(c, steps):
    return lambda step: c.learning_rate
'''


@pytest.fixture
def site(tmp_path):
    """A folder where a test installs packages."""
    with importable(tmp_path):
        yield tmp_path


def refused(words, **keys):
    with pytest.raises(jt.UserError) as refusal:
        jt.make_config({}, {key.replace("__", "."): value for key, value in keys.items()})
    assert words in f"{refusal.value}"


def test_options_are_the_section_of_the_name(site):
    install(site, "some-steps", {"jaxtrain.schedules": {"steps": "stairs:Steps", "plain": "stairs:plain"}},
            {"stairs": SOURCE})
    usual = jt.make_config({}, {"optimizer.schedule": "steps"})
    assert usual.to_dict()["steps"]["height"] == 1.0  # what config.json keeps
    asked = jt.make_config({}, {"optimizer.schedule": "steps", "steps.height": "0.5"})
    assert part_tables.SCHEDULES.made("steps", asked.plug_ins["steps"])(asked.optimizer, 3)(0) == 0.5e-3
    assert jt.make_config(asked.to_dict()) == asked != usual
    assert jt.make_config({}, {"optimizer.schedule": "plain"}).plug_ins == {}
    refused("steps.heigth: there is no such key; did you mean 'height'?", optimizer__schedule="steps", steps__heigth=1)
    refused("steps.height: 'high' is not a finite number", optimizer__schedule="steps", steps__height="high")
    refused("steps: nothing reads it, since optimizer.schedule does not name the schedule 'steps'; set optimizer."
            "schedule=steps, or leave it out", steps__height=1.0)
    refused("optimizer.schedule: there is no schedule 'step'; did you mean 'steps'?", optimizer__schedule="step")
    assert "| `steps.height` | `1.0` | of the steps |" in key_reference.reference()
    assert "plain" not in plug_in_sections.sections() and "steps" in plug_in_sections.sections()


def test_a_part_may_be_made_from_options_of_another_class(site):
    source = SOURCE + ("\nclass Double:\n    section = Steps\n"
                       "    def __init__(self, options):\n        self.of = options\n"
                       "    def __call__(self, c, steps):\n        return lambda step: 2 * self.of.height\n")
    install(site, "some-steps", {"jaxtrain.schedules": {"double": "stairs:Double"}}, {"stairs": source})
    asked = jt.make_config({}, {"optimizer.schedule": "double", "double.height": 3.0})
    for options, rate in ((asked.plug_ins["double"], 6.0), (None, 2.0)):
        assert part_tables.SCHEDULES.made("double", options)(asked.optimizer, 3)(0) == rate


@pytest.mark.parametrize(("field", "words"), [
    ("tags: int | None = None", "steps.tags: its type in Steps is int | None; declare it as int, float, bool, str"),
    ("tags: int", "steps.tags: it is missing, and has no default; give it")])
def test_options_that_no_config_can_give_are_refused(site, field, words):
    source = SOURCE.replace("    height:", f"    {field}\n    height:").replace("class Steps:", "class Options:") + (
        "\nclass Steps:\n    section = Options\n    def __call__(self, c, steps):\n        return lambda step: 1.0\n")
    install(site, "some-steps", {"jaxtrain.schedules": {"steps": "stairs:Steps"}}, {"stairs": source})
    refused(words.replace("Steps", "Options"), optimizer__schedule="steps")


def test_one_name_of_two_packages_is_refused(site):
    for name in ("one", "two"):
        install(site, name, {"jaxtrain.schedules": {"steps": f"{name}_stairs:Steps", name: f"{name}_stairs:Steps"}},
                {f"{name}_stairs": SOURCE})
    refused("optimizer.schedule: the packages one and two both register the schedule 'steps'; uninstall one of them",
            optimizer__schedule="steps")
    assert jt.make_config({}, {"optimizer.schedule": "two"}).plug_ins["two"].height == 1.0


@pytest.mark.parametrize(("group", "name", "keys", "words"), [
    ("schedules", "cosine", {"optimizer__schedule": "steps"}, "the schedule 'cosine', and jaxtrain has one"),
    ("families", "gpt2", {"model__name": "gpt3"}, "the model 'gpt2', and jaxtrain has one of this name; rename it"),
    ("extensions", "mesh", {"steps__height": 1}, "the extension 'mesh', and jaxtrain has one of this name"),
    ("schedules", "lora", {"optimizer__schedule": "lora"}, "the schedule 'lora' has options, and a section of this")])
def test_a_name_of_jaxtrains_own_is_refused(site, group, name, keys, words):
    install(site, "takes-names", {f"jaxtrain.{group}": {name: "stairs:Steps"}}, {"stairs": SOURCE})
    refused(words, **keys)
    assert jt.make_config({}).optimizer.schedule == "cosine"  # a config without other packages is as before


@pytest.mark.parametrize(("value", "words"), [
    ("no_such_module:Steps", "cannot be imported (ModuleNotFoundError"), ("stairs:Stepz", "(AttributeError"),
    ("stairs:SOURCE", "is of the type int, which cannot be used as one; correct or uninstall that package")])
def test_one_that_is_broken_is_told_with_its_package(site, value, words):
    install(site, "some-steps", {"jaxtrain.schedules": {"steps": value}}, {"stairs": SOURCE + "\nSOURCE = 1\n"})
    refused(f"optimizer.schedule: the schedule 'steps', the entry point {value} of the package some-steps, {words}" if
            "(Attr" not in words else words, optimizer__schedule="steps")
    assert "steps" not in plug_in_sections.sections()


def test_nobody_pays_who_has_none():
    """Entry points are read from all installed packages, which takes longer than to check a config."""
    code = ("import sys, jaxtrain as jt; jt.make_config({'optimizer': {'name': 'muon'}}); "
            "print({'importlib.metadata', 'jax'} & sys.modules.keys())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_package_in_two_folders_of_the_path_counts_once(monkeypatch):
    point = metadata.EntryPoint("steps", "stairs:Steps", "jaxtrain.schedules")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point, point])
    plug_ins.points.cache_clear()
    assert Kind("schedule", "jaxtrain.schedules", "optimizer.schedule").names() == ["steps"]
    assert plug_ins.points("jaxtrain.schedules") == {"steps": [point]}
    plug_ins.points.cache_clear()
