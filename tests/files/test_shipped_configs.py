"""The configs that come with jaxtrain are found by name; a misspelt name is answered with the nearest."""

import json
from pathlib import Path

import pytest

import jaxtrain as jt
from jaxtrain.commands import configs
from jaxtrain.commands.flags import workdir_of
from jaxtrain.commands.train import training_flags
from jaxtrain.files import shipped_configs
from jaxtrain.runs.traced_run import open_traced

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_all_configs_of_the_repository_have_a_name():
    assert shipped_configs.names() == sorted(file.stem for file in (ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize(("name", "path"), {
    "gpt": "gpt.py", "gpt:tiny": "gpt.py:tiny", "finetune": "finetune.py", "whisper:base": "whisper.py:base"}.items())
def test_a_name_is_its_file(name, path):
    by_path = jt.load_config(f"{ROOT}/configs/{path}", {"train.seed": 3})
    assert jt.load_config(name, {"train.seed": 3}) == by_path
    assert jt.load_config(f"{ROOT}/configs/{name}", {"train.seed": 3}) == by_path, "a path needs no .py, as before"


def test_a_file_of_ones_own_comes_first(tmp_path):
    (tmp_path / "gpt.py").write_text("def get_config(variant='none'):\n"
                                     "    return {'model': {'num_layers': {'none': 7, 'big': 9}[variant]}}\n")
    assert [jt.load_config(name).model.num_layers for name in ("gpt", "gpt:big", "gpt.py:big")] == [7, 9, 9]


def test_the_default_workdir_is_named_after_it():
    assert [str(workdir_of(training_flags([name])[0])) for name in ("gpt", "gpt:tiny", "finetune:lora:models/smol")] \
        == ["runs/gpt", "runs/gpt-tiny", "runs/finetune-lora-models-smol"]


@pytest.mark.parametrize(("name", "told"), {
    "gtp": "there is no config 'gtp'; did you mean 'gpt'? (or give the path of a file)",
    "lama3_8b:tiny": "there is no config 'lama3_8b'; did you mean 'llama3_8b'? (or give the path of a file)",
    "configs/gpt.py:tiny": "there is no file configs/gpt.py; write gpt:tiny for the config of this name that comes "
                           "with jaxtrain",
    "configs/gpt": "there is no file configs/gpt.py; write gpt for the config of this name that comes with jaxtrain",
    "no/such.py": "there is no file no/such.py; give the name of a config such as gpt, or its path",
    "gpt.json": "there is no file gpt.json; give the name of a config such as gpt, or its path",
    "gpt:tyni": f"gpt.py has no variant 'tyni': known are tiny, cpu, accelerator, 124m; see {ROOT}/configs/gpt.py",
}.items())
def test_what_is_no_config_is_told(name, told):
    with pytest.raises(jt.UserError) as wrong:
        jt.load_config(name)
    assert f"{wrong.value}" == f"--config: {told}"


def test_a_far_name_lists_all():
    with pytest.raises(jt.UserError, match=rf"known: {', '.join(shipped_configs.names())} \(or give"):
        jt.load_config("xyzzy")


def test_commands_that_take_a_workdir_too_take_a_name(tmp_path):
    (tmp_path / "text").write_text("a line of a text that is long enough\n" * 300)
    traced = open_traced("gpt:tiny", {"data.source": "text", "data.cache_dir": "cache"})
    assert traced.steps == 20
    (tmp_path / "gpt").mkdir()
    with pytest.raises(jt.UserError):  # a folder is a corpus or a workdir, as before
        open_traced("gpt", {"data.source": "text"})


def test_they_are_listed_and_printed(capsys):
    assert configs.main([]) == 0
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines()] == shipped_configs.names()
    assert configs.main(["gpt"]) == 0
    assert capsys.readouterr().out == (ROOT / "configs/gpt.py").read_text()
    assert configs.main(["--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["name"] for row in rows] == shipped_configs.names() and all(Path(row["file"]).is_file() for row in rows)
    assert all(row["about"] and row["about"] in table for row in rows)
    assert configs.main(["gpt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == (ROOT / "configs/gpt.py").read_text()
    assert configs.main(["gtp"]) == 2
    assert capsys.readouterr().err == "NAME: no config of the name 'gtp' comes with jaxtrain; did you mean 'gpt'?\n"
