"""Errors name the way to install an extra that fits how jaxtrain itself was installed."""

from pathlib import Path

from jaxtrain import errors
from jaxtrain.files import shipped_configs


def test_an_extra_is_installed_from_where_jaxtrain_is(monkeypatch):
    assert errors.install_extra("data") == "run pip install -e '.[data]' in jaxtrain's folder"
    monkeypatch.setattr(errors, "__file__", "/lib/python3/site-packages/jaxtrain/errors.py")
    assert errors.install_extra("data") == "run pip install 'jaxtrain[data]'"


def test_an_installed_package_has_the_configs_inside(monkeypatch, tmp_path):
    assert shipped_configs.folder() == Path(__file__).parents[1] / "configs"
    (tmp_path / "jaxtrain" / "configs").mkdir(parents=True)
    (tmp_path / "configs").mkdir()  # of another package
    monkeypatch.setattr(shipped_configs, "__file__", f"{tmp_path}/jaxtrain/files/shipped_configs.py")
    assert shipped_configs.folder() == tmp_path / "jaxtrain" / "configs"
