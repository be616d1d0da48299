"""Names of tasks are checked by the harness's YAML files, before it is imported and before any weights are read."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxtrain.errors import UserError
from jaxtrain.hub.folders import task_names


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """A package like the harness, with one task, a group and a tag."""
    (tmp_path / "lm_eval" / "tasks" / "inner").mkdir(parents=True)
    (tmp_path / "lm_eval" / "tasks" / "inner" / "some.yaml").write_text("tag:\n  - reading\ntask: hellaswag\n")
    (tmp_path / "lm_eval" / "tasks" / "group.yaml").write_text("group: 'all_of_them'\ntask: [hellaswag]\n")
    spec = SimpleNamespace(submodule_search_locations=[f"{tmp_path / 'lm_eval'}"])
    monkeypatch.setattr(task_names.importlib.util, "find_spec", lambda name: spec)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.yaml").write_text('task: "own_words"\n')
    return tmp_path


def test_names_of_tasks_groups_tags_and_patterns_are_known(harness):
    task_names.check(["hellaswag", "all_of_them", "reading", "some", "mmlu_*"], None)
    task_names.check(["own_words", "hellaswag"], f"{harness / 'mine'}")


@pytest.mark.parametrize(("names", "include", "message"), [
    (["hellaswga"], "", "--tasks: there is no task 'hellaswga'; did you mean 'hellaswag'?"),
    (["hellaswag", "xyz"], "", "--tasks: there is no task 'xyz'; see lm-eval ls tasks, or name the folder of your own"),
    (["own_words"], "", "--tasks: there is no task 'own_words'; see"),
    (["xyz"], "nowhere", "--include: nowhere is not a folder")])
def test_another_name_is_refused(harness, names, include, message):
    with pytest.raises(UserError) as refused:
        task_names.check(names, include)
    assert f"{refused.value}".startswith(message)


def test_neither_the_harness_nor_jax_is_imported_to_refuse_one(tmp_path):
    pytest.importorskip("lm_eval")
    code = ("import sys\nfrom jaxtrain.commands import evaluate\n"
            f"status = evaluate.main(['{tmp_path}', '--tasks=no_such_task_anywhere'])\n"
            "print(status, sorted({'jax', 'lm_eval', 'torch'} & {*sys.modules}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "2 []\n" and "there is no task 'no_such_task_anywhere'" in done.stderr
