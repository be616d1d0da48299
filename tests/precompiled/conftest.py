"""A secret of the run, and the folder of a small config's programs for one device."""

import contextlib
import dataclasses
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain.config.load import load_config
from jaxtrain.config.schema import Config
from jaxtrain.distributed import authentication
from jaxtrain.precompiled import compiling
from tests.tiny import ROOT, SAME_BITS, devices, tiny_flags

TINY = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_batches=1",
        "data.global_batch_size=8", "train.steps=4", "train.eval_every=2", "checkpoint.every=2", "train.progress=false"]


@dataclasses.dataclass(frozen=True)
class Made:
    """A folder of programs, and what it was compiled from."""

    config: Config
    folder: Path
    flags: list[str]


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    """The file with the run's secret."""
    path = tmp_path_factory.mktemp("secret") / "secret"
    authentication.make_secret(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAXTRAIN_SECRET", raising=False)
        patch.setenv("JAXTRAIN_SECRET_FILE", str(path))
        authentication.secret.cache_clear()
        yield path
    authentication.secret.cache_clear()


@contextlib.contextmanager
def no_compilation_cache():
    """Have JAX compile, as the command does: XLA for CPU cannot write again what came from a cache."""
    def enable(enabled):
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()  # it remembers whether it is used

    before = jax.config.jax_enable_compilation_cache
    enable(False)
    try:
        yield
    finally:
        enable(before)


@pytest.fixture(scope="module")
def made(secret, tmp_path_factory):
    """A function from the keys of a mesh to the compiled folder; each is compiled once."""
    found: dict[tuple[str, ...], Made] = {}

    def make(*mesh: str) -> Made:
        if mesh not in found:
            flags = tiny_flags(tmp_path_factory, [*TINY, *mesh])
            overrides = dict(flag.removeprefix("--config.").split("=", 1) for flag in flags[1:])
            overrides |= {f"train.compiler_options.{name}": f"{value}" for name, value in SAME_BITS.items()}
            found[mesh] = Made(load_config(f"{ROOT}/configs/gpt.py:tiny", overrides),
                               tmp_path_factory.mktemp("compiled"),
                               [flags[0], *(f"--config.{key}={value}" for key, value in overrides.items())])
            with devices(8 if mesh else 1), no_compilation_cache():
                target, here = compiling.devices_of("cpu")
                compiling.compile_into(found[mesh].folder, found[mesh].config, target, here)
        return found[mesh]

    return make


@pytest.fixture
def compilations():
    """The names of the programs that are compiled."""
    names: list[str] = []

    def note(event: str, seconds: float, **about: str) -> None:
        if event.endswith("backend_compile_duration"):
            names.append(about.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)
