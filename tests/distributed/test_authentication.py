"""Nobody but the processes of a run can tell them anything, where they have a secret."""

import os
import threading

import pytest

from jaxtrain.distributed import authentication
from jaxtrain.distributed.authentication import Forged, make_secret, opened, sealed, secret
from jaxtrain.errors import UserError


@pytest.fixture
def secret_file(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    make_secret(path)
    monkeypatch.setenv("JAXTRAIN_SECRET_FILE", str(path))
    secret.cache_clear()
    yield path
    secret.cache_clear()


def test_only_this_user_can_read_it_and_a_second_one_does_not_replace_it(tmp_path):
    made = []
    threads = [threading.Thread(target=lambda: (make_secret(tmp_path / "run/secret"),
                                                made.append((tmp_path / "run/secret").read_text())))
               for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 1 and len(made[0].strip()) == 64
    assert (tmp_path / "run/secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["secret"]


def test_a_value_is_opened_only_under_its_name_and_by_who_has_the_secret(secret_file, monkeypatch):
    content = sealed("exchange/1/0", {"refused": ["a", "b", "c"]})
    assert opened("exchange/1/0", content) == {"refused": ["a", "b", "c"]}
    planted = ('- {"refused": ["a", "b", "c"]}', '{"refused": []}', "", "x" * 64 + " {}", content[:-1] + " ")
    for name, text in [("exchange/2/0", content), *(("exchange/1/0", other) for other in planted)]:
        with pytest.raises(Forged, match="does not come from a process of this run"):
            opened(name, text)
    secret_file.write_text("another secret of enough characters")
    secret.cache_clear()
    with pytest.raises(Forged):
        opened("exchange/1/0", content)


def test_without_a_secret_values_are_as_before(monkeypatch):
    monkeypatch.delenv("JAXTRAIN_SECRET", raising=False)
    monkeypatch.delenv("JAXTRAIN_SECRET_FILE", raising=False)
    secret.cache_clear()
    assert secret() == b"" and opened("x", sealed("y", [1])) == [1]


@pytest.mark.parametrize(("content", "mode", "message"), [
    ("enough random characters", 0o644, "can be read by others"), ("short", 0o600, "5 characters can be guessed"),
    (None, 0o600, "cannot be read"), ("pipe", 0o600, "is not a plain file")])
def test_a_secret_that_is_none_is_refused(tmp_path, monkeypatch, content, mode, message):
    path = tmp_path / "secret"
    if content == "pipe":
        os.mkfifo(path, mode)
    elif content:
        path.write_text(content)
        path.chmod(mode)
    monkeypatch.setenv("JAXTRAIN_SECRET_FILE", str(path))
    secret.cache_clear()
    with pytest.raises(UserError, match=rf"^JAXTRAIN_SECRET.*{message}"):
        authentication.secret()
    secret.cache_clear()


def test_a_run_uses_the_secret_in_its_workdir(tmp_path, monkeypatch):
    """A run started by hand can read the snapshots that a supervised one left."""
    monkeypatch.delenv("JAXTRAIN_SECRET", raising=False)
    monkeypatch.setenv("JAXTRAIN_SECRET_FILE", "")  # undone afterwards
    monkeypatch.delenv("JAXTRAIN_SECRET_FILE")
    authentication.find_secret(tmp_path)
    assert "JAXTRAIN_SECRET_FILE" not in os.environ  # there is none
    make_secret(tmp_path / "secret")
    (tmp_path / "secret").chmod(0o644)
    authentication.find_secret(tmp_path)
    assert "JAXTRAIN_SECRET_FILE" not in os.environ  # others can read it
    (tmp_path / "secret").chmod(0o600)
    authentication.find_secret(tmp_path)
    assert os.environ["JAXTRAIN_SECRET_FILE"] == str(tmp_path / "secret")
    authentication.find_secret(tmp_path / "other")
    assert os.environ["JAXTRAIN_SECRET_FILE"] == str(tmp_path / "secret")  # given already
