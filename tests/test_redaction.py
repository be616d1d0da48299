"""The credentials in the URLs of mirrors and sources stand nowhere: not in files, messages, errors or logs."""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import traceback
import warnings
from pathlib import Path

import fsspec
import jax
import pytest
from fsspec.implementations.local import LocalFileSystem

from jaxtrain import errors, redaction, storage
from jaxtrain.bench import records
from jaxtrain.checkpoint import mirror
from jaxtrain.commands import publish
from jaxtrain.commands.bench import main as bench
from jaxtrain.commands.checkpoint import main as checkpoint
from jaxtrain.commands.inspect import main as inspect
from jaxtrain.commands.prepare import main as prepare_command
from jaxtrain.config import schema
from jaxtrain.config.load import load_config, make_config
from jaxtrain.data.corpus import remote
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.distributed import authentication, lines, processes
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.observe import events
from jaxtrain.redaction import redacted
from jaxtrain.trainer import extended
from tests.data import made
from tests.each_batch import at_each_batch

TINY = f"{Path(__file__).parents[1]}/configs/gpt.py:tiny"
SECRETS = ("Sw0rd/f1sh+1", "0pen_s3same", "S1gned77")
MIRROR = f"vault://keeper:{SECRETS[0]}@store/runs/a"
SOURCE = f"vault://{SECRETS[1]}@store/corpus"


class Vault(LocalFileSystem):
    """A store at `vault://USER:PASSWORD@store/...`, in a local folder, whose errors quote the URL that was asked for.
    """

    protocol = "vault"
    root, refuses = Path(), ""
    cachable = False

    def __init__(self, **options):
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path):
        path = os.fspath(path)
        if "://" not in path:
            return path.rstrip("/") or "/"
        return f"{cls.root}/{path.partition('@store/')[2] or path.partition('://')[2]}".rstrip("/")

    def _ask(self, path):
        path = os.fspath(path)
        if self.refuses and re.search(self.refuses, path):
            raise PermissionError(f"403 for {path!r}, that is {path.partition('://')[2]}, "
                                  f"{'with a very long explanation ' * 5}of {path}")

    def info(self, path, **options):
        self._ask(path)
        return super().info(path, **options)

    def put_file(self, local, path, **options):
        self._ask(path)
        return super().put_file(local, path, **options)


@pytest.fixture
def vault(tmp_path, monkeypatch):
    fsspec.register_implementation("vault", Vault, clobber=True)
    storage._connected.cache_clear()
    monkeypatch.setattr(Vault, "root", tmp_path / "store")
    monkeypatch.setattr(Vault, "refuses", "")
    monkeypatch.setattr(storage, "PAUSE", (0.0, 0.0))
    monkeypatch.setattr(mirror, "PAUSE", (0.01, 0.02))
    (tmp_path / "store").mkdir()
    made.corpus(tmp_path / "store/corpus", shards=1, tokens=20_000)
    yield tmp_path / "store"
    storage._connected.cache_clear()


def leaks(folder, *texts):
    """The secrets in these texts and in any file or name of a file below the folder."""
    found = [(path, secret) for path in folder.rglob("*") for secret in SECRETS
             if secret in str(path) or (path.is_file() and secret.encode() in path.read_bytes())]
    return found + [(text[max(0, text.index(secret) - 80):][:160], secret) for text in texts for secret in SECRETS
                    if secret in text]


class Service:
    """A stand-in for JAX's coordination service, which keeps what it is told."""

    def __init__(self):
        self.kept = {}

    def key_value_set(self, key, value):
        self.kept[key] = value

    def blocking_key_value_get(self, key, _):
        return self.kept[key]

    def wait_at_barrier(self, *_):
        pass

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.kept.items() if key.startswith(folder)]


@pytest.mark.slow
def test_no_run_however_it_fails_writes_or_says_a_password(vault, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = []
    before = jax.config.jax_compilation_cache_dir, sys.excepthook, warnings.formatwarning
    common = (f"--config={TINY}", f"--config.checkpoint.mirror={MIRROR}", f"--config.data.source={SOURCE}",
              "--config.train.steps=4", "--config.checkpoint.every=2", f"--config.data.cache_dir={tmp_path}/cache")

    def attempt(status, *flags, workdir="work", words="", do=main, given=common):
        """Run, and require this end; keeps what was said of it."""
        where = [f"--workdir={tmp_path / workdir}"] if do is main else []
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert do([*where, *given, *flags]) == status
        except RuntimeError:
            assert status is None  # the interpreter would show it like this
            sys.excepthook(*sys.exc_info())
        out, err = capsys.readouterr()
        err += "".join(f"{warning.message}\n" for warning in caught)
        said.append(out + err)
        assert words in out + err, (words, out + err)

    def damaged(path, at=100):
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)

    # 1. All is well: the mirror gets its copies, under the credentials of its URL.
    attempt(0, words="step")
    assert (vault / "runs/a/4/good.json").exists()
    # 2. The mirror refuses reads, so that it is not known whether there is anything to go on from, or only writes.
    Vault.refuses = "runs/b"
    attempt(2, f"--config.checkpoint.mirror={MIRROR[:-1]}b", workdir="refused", words="runs/b/owner.json: cannot be")
    Vault.refuses = r"runs/b/\d"
    attempt(0, f"--config.checkpoint.mirror={MIRROR[:-1]}b", workdir="refused", words="not copied to vault://***@store")
    Vault.refuses = ""
    # 3. The mirror holds another run's copies.
    attempt(0, workdir="refused", words="holds copies of another run")
    # 4. There is no such source.
    attempt(2, f"--config.data.source={SOURCE}/none", workdir="none", words="has no manifest.json")
    # 5. The source refuses.
    Vault.refuses = "manifest"
    attempt(2, workdir="denied", words="PermissionError")
    Vault.refuses = ""
    # 6. The run in the workdir has other settings.
    attempt(2, "--config.data.seed=7", words="data.seed=0")
    # 7. The data is not what the run began with.
    shutil.copytree(vault / "corpus", vault / "corpus2")
    manifest = json.loads((vault / "corpus2/manifest.json").read_text())
    del manifest["sha256"]
    content = manifest | {"plan": "other"}
    (vault / "corpus2/manifest.json").write_text(json.dumps(content | {"sha256": remote.atomic_files.digest(content)}))
    attempt(2, f"--config.data.source={SOURCE}2", words="other data")
    # 8. The local checkpoints are lost, and the only copy is damaged.
    shutil.copytree(tmp_path / "work", tmp_path / "lost")
    for folder in (tmp_path / "lost/checkpoints/2", tmp_path / "lost/checkpoints/4", vault / "runs/a/2"):
        shutil.rmtree(folder, ignore_errors=True)
    damaged(next(path for path in (vault / "runs/a/4").rglob("*") if path.is_file() and path.stat().st_size > 300
                 and path.name != "good.json"))
    attempt(2, workdir="lost", words="differs from good.json")
    shutil.rmtree(vault / "runs/a")
    # 9. The source is corrupt, and that is an error, or skipped with a warning.
    shutil.rmtree(tmp_path / "cache")
    damaged(vault / "corpus/train-00000.bin")
    attempt(2, workdir="corrupt", words="is corrupt: bytes")
    attempt(0, "--config.data.corrupt=skip_and_count", workdir="corrupt2", words="is corrupt")
    damaged(vault / "corpus/train-00000.bin")
    # 10. Flags and keys are mistyped.
    for mistake in ("--config.checkpoint.mirrror=", "--config.checkpoint.keep=", "--mirror=", "--config.model.name=",
                    "--config.train.remat=", "--config.resilience.meshes=", "--coordinator="):
        attempt(2, f"{mistake}{MIRROR}", workdir="mistake")
    attempt(2, f"--config.data.source=nothing{SOURCE[5:]}", workdir="mistake", words="nothing://")
    # 11. It is stopped.
    with monkeypatch.context() as patch:
        at_each_batch(lambda step, place: (
            os.kill(os.getpid(), signal.SIGTERM) if step == 2 else None, place())[1], patch.setattr)
        attempt(75, f"--config.checkpoint.mirror={MIRROR}11", workdir="stopped", words="stop")
    # 12. A bug raises what quotes the URL.
    with monkeypatch.context() as patch:
        def broken(self, *_):
            raise RuntimeError(f"cannot go on with {self.config.checkpoint.mirror} and '{self.config.data.source}'")
        patch.setattr(extended, "drawn", broken)
        attempt(None, f"--config.checkpoint.mirror={MIRROR}12", workdir="broken",
                words="cannot go on with vault://***@store/runs/a12 and 'vault://***@store")
    # 13. The configs are shown, and the run's own is a config, but not one with the password.
    attempt(0, "--print_config", workdir="shown", words="vault://***@store/runs/a")
    attempt(2, workdir="again", given=(f"--config={tmp_path}/work/config.json",), words="not written down; give the")
    # 14. Other commands.
    attempt(0, "list", f"{tmp_path}/work", given=(), do=checkpoint, words="give the whole URL again as --mirror=URL")
    attempt(0, "list", f"{tmp_path}/work", f"--mirror={MIRROR}", given=(), do=checkpoint, words="local")
    attempt(0, "restore-to", f"{tmp_path}/work", "2", given=(), do=checkpoint, words="--mirror=URL); this matters")
    attempt(2, str(vault / "corpus"), f"--output=vault://u:{SECRETS[0]}@store/corpus2", given=(), do=publish.main,
            words="another corpus")
    attempt(0, str(vault / "corpus"), f"--output=vault://u:{SECRETS[0]}@store/corpus3", given=(), do=publish.main,
            words="complete")
    attempt(2, "--step=1", f"--config.data.source={SOURCE}/none", do=inspect, given=common[:1], words="has no manifest")
    attempt(2, f"--input={SOURCE}/none", f"--output={tmp_path}/prepared", given=(), do=prepare_command)
    attempt(2, f"--input={SOURCE}", f"--output={tmp_path}/x", "--engine=slurm", given=(), do=prepare_command,
            words="the script would have")
    assert bench([f"--config={TINY}", f"--config.data.source={SOURCE}", "--steps=1", "--warmup=1",
                  f"--output={tmp_path}/bench.jsonl"]) in (0, 1)
    said.append("".join(capsys.readouterr()))
    assert (tmp_path / "bench.jsonl").exists()
    # 15. Two processes do not agree.
    service = Service()
    monkeypatch.setattr(jax._src.distributed.global_state, "client", service)
    config = make_config({}, {"checkpoint.mirror": MIRROR, "data.source": SOURCE})
    processes.agree(config)
    monkeypatch.setattr(jax._src.distributed.global_state, "process_id", 1)
    with pytest.raises(UserError, match=r"vault://\*\*\*@store/runs/a") as caught:
        processes.agree(make_config({}, {"checkpoint.mirror": f"{MIRROR}/b", "data.source": SOURCE}))
    said += [str(caught.value), *service.kept.values()]

    jax.config.update("jax_compilation_cache_dir", before[0])
    sys.excepthook, warnings.formatwarning = before[1:]
    assert leaks(tmp_path, *said) == []
    for name in ("config.json", "good.json", "events.jsonl", "bench.jsonl"):  # they tell where, without it
        assert any(b"vault://***@store" in path.read_bytes() for path in tmp_path.rglob(name))


def of_config():
    return json.dumps(make_config({}, {"checkpoint.mirror": MIRROR}).to_dict())


def of_event(folder):
    events.record(folder, "x", why=MIRROR, more=[{"place": f"{SOURCE} is gone"}])
    return (folder / "events.jsonl").read_text()


def of_message(capsys):
    errors.say(f"cannot reach {MIRROR}")
    return capsys.readouterr().err


def of_traceback(capsys):
    redaction.hide_in_tracebacks()
    try:
        raise RuntimeError(MIRROR)
    except RuntimeError:
        sys.excepthook(*sys.exc_info())
    return capsys.readouterr().err


def of_line():
    sent = []

    class Socket:
        def sendall(self, content):
            sent.append(content.decode())

        def setsockopt(self, *_):
            pass

    line = lines.Line(Socket(), b"k", accepts=True)
    line._begin("a", "b")
    line.send({"why": f"{MIRROR} failed"})
    return "".join(sent)


def of_long_error():
    """Cut where the user and the @ are not within it."""
    before = 300 - len("OSError: ") - len(" vault://keeper:Sw0rd/f1")
    return processes._first_line(OSError(f"{'x' * before} {MIRROR}"))


def of_storage():
    with pytest.raises(UserError) as caught:
        storage._tried(MIRROR, lambda: (_ for _ in ()).throw(OSError("y" * 170 + f" {MIRROR.partition('://')[2]}")))
    return "".join(traceback.format_exception(caught.value)) + repr(caught.value.__cause__)


def of_user_error():
    error = UserError(MIRROR, f"is not {MIRROR}", f"take {SOURCE}")
    return f"{error} {error.key} {error.reason} {error.fix} {error.args}"


def of_bench(folder):
    records.append(folder / "b.jsonl", {"name": f"x data.source={SOURCE}"})
    command = records.command_line("-m jaxtrain.bench", [f"--config.data.source={SOURCE}"])
    return (folder / "b.jsonl").read_text() + command


def of_lost():
    return remote.RemoteColumn(f"{SOURCE}/x", remote.np.dtype("u1"), 0, "", "", None, True).damage.name


POINTS = {  # where text leaves: the module that hides, and what then stands there
    "config": (schema, of_config), "event": (events, of_event), "message": (errors, of_message),
    "traceback": (redaction, of_traceback), "line": (lines, of_line), "long error": (processes, of_long_error),
    "storage": (storage, of_storage), "user error": (errors, of_user_error), "bench": (records, of_bench),
    "lost": (remote, of_lost), "describe": (None, None), "exchange": (authentication, None),
}


@pytest.mark.parametrize("name", POINTS)
def test_every_place_that_hides_is_needed(name, tmp_path, capsys, monkeypatch):
    from jaxtrain.data.prepare import tasks

    module, do = POINTS[name]
    if name == "describe":
        module, do = tasks, lambda: json.dumps(Options(describe=(f"url={SOURCE}",)).identity())
    if name == "exchange":
        do = lambda: authentication.sealed("x", {"failed": f"{MIRROR} is away"})  # noqa: E731
    monkeypatch.setattr(storage, "PAUSE", (0.0, 0.0))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    given = {"folder": tmp_path, "capsys": capsys}
    words = {key: given[key] for key in do.__code__.co_varnames[:do.__code__.co_argcount]}
    shown = do(**words)
    assert redaction.HIDDEN in shown or name == "long error"
    assert not any(secret in shown for secret in (*SECRETS, "Sw0rd"))
    monkeypatch.setattr(module, "redacted", lambda value: value)
    monkeypatch.setattr(errors, "redacted", lambda value: value)  # the last line of defence of all errors
    assert any(secret in do(**words) for secret in (*SECRETS, "Sw0rd"))


@pytest.mark.parametrize(("text", "shown"), [
    ("s3://KEY:sec/ret+x=@bucket/run and more", "s3://***@bucket/run and more"),
    ("s3://KEY:12/secret@bucket/run", "s3://***@bucket/run"),
    ("http://u:p@host:80/a@b?sig=abc&x=1, then", "http://***@host:80/a@b?sig=***&x=***, then"),
    ("see (https://host/x?X-Amz-Signature=abc%2B).", "see (https://host/x?X-Amz-Signature=***)."),
    ("https://token@host/x", "https://***@host/x"),
    ("https://host/x#access_token=abc", "https://host/x#access_token=***"),
    ("one,http://u:p@h,http://v:q@i", "one,http://***@h,http://***@i"),
    ("s3://k:pass word@bucket/x", "s3://***@bucket/x"),
    ("url=URL('http://u:p'q\"@host')", "url=URL('http://***@host')"),
    ("simplecache::s3://k:s@b", "simplecache::s3://***@b"),
])
def test_credentials_are_recognized(text, shown):
    assert redacted(text) == shown and redacted(shown) == shown
    assert redacted({"a": [text, 3], "b": (text, None)}) == {"a": [shown, 3], "b": (shown, None)}


@pytest.mark.parametrize("text", [
    "http://host:8080/a@b", "abfs://container@account.dfs/x", "s3://bucket/a:b@c", "http://[::1]:80/a@b",
    "file:///home/x:y@z", "tcp://1.2.3.4:55, mail a@b", "a@b.c", "s3://bucket/run: not there, ask me@home", "std://lib",
])
def test_everything_else_stays(text):
    assert redacted(text) == text


def test_the_query_of_a_signed_url_stays_at_its_end():
    assert storage.join("https://host/corpus/?sig=abc", "a/b") == "https://host/corpus/a/b?sig=abc"
    assert storage.join("/a?b", "c") == "/a?b/c" and storage.join("s3://a?b", "c") == "s3://a?b/c"


@pytest.mark.slow
def test_names_of_files_do_not_have_the_query(tmp_path, monkeypatch):
    """A signed URL of one file is input whose manifest does not have the signature."""
    pytest.importorskip("aiohttp", reason="aiohttp comes with the extra .[test-all]")
    import http.server
    import threading

    content = "".join(f'{{"text": "line {n} of a text"}}\n' for n in range(50)).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            right = (self.path == f"/data/a.jsonl?sig={SECRETS[2]}"
                     and self.headers.get("Authorization") == "Basic cmVhZGVyOjBwZW5fczNzYW1l")
            first, last = (self.headers.get("Range") or "bytes=0-999999999").removeprefix("bytes=").split("-")
            body = content[int(first):int(last) + 1] if right else b"no"
            self.send_response(403 if not right else 206 if "Range" in self.headers else 200)
            self.send_header("Content-Length", str(len(body)))
            if "Range" in self.headers:
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(body) - 1}/{len(content)}")
            self.send_header("Accept-Ranges", "bytes")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    monkeypatch.setattr(storage, "PAUSE", (0.0, 0.0))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"127.0.0.1:{server.server_port}/data/a.jsonl?sig="
        url = f"http://reader:{SECRETS[1]}@{where}{SECRETS[2]}"
        assert [found.name for found in storage.find(url)] == ["a.jsonl"]
        corpus = prepare([url], tmp_path / "corpus", Options(eval_fraction=0.2))
        assert corpus.train.num_documents + corpus.eval.num_documents == 50
        with pytest.raises(UserError) as caught:
            prepare([f"http://reader:{SECRETS[1]}@{where}{SECRETS[2]}x"], tmp_path / "denied", Options())
        server.shutdown()
    assert leaks(tmp_path, "".join(traceback.format_exception(caught.value))) == []


@pytest.mark.slow
def test_the_keys_of_s3_in_a_url_are_used(bucket, network, tmp_path, monkeypatch, capsys):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "file").write_bytes(b"content")
    url = f"s3://testing:{SECRETS[0]}@{bucket.removeprefix('s3://')}/run@2"
    storage.put(tmp_path / "file", f"{url}/file")
    assert [(found.name, found.path) for found in storage.find(url)] == [("file", f"{url}/file")]
    assert storage.read(f"{url}/file") == b"content" and storage.names(url) == ["file"]
    connected = storage._filesystem(url)[0]
    assert (connected.key, connected.secret) == ("testing", SECRETS[0])
    with contextlib.suppress(UserError):
        storage.find(f"s3://testing:{SECRETS[0]}@no such bucket/x")
    storage.remove(url)
    assert storage.names(url) == []
    with pytest.raises(storage.Gone) as caught:
        storage.read(f"{url}/file")
    assert leaks(tmp_path, "".join(traceback.format_exception(caught.value)), *capsys.readouterr()) == []


def test_a_config_of_a_run_says_that_its_credentials_are_missing(tmp_path):
    (tmp_path / "config.json").write_text(of_config())
    config = load_config(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"vault://.*credentials are not written down; give the whole URL again"):
        mirror.Mirror(tmp_path, config.checkpoint.mirror)
