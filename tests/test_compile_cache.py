"""Programs that are kept between starts: damaged ones are compiled again, and nothing depends on the disk."""

import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache

from jaxtrain import compile_cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which JAX keeps its programs for the length of a test."""
    before = {name: getattr(jax.config, name) for name in
              ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")}
    monkeypatch.setattr(compilation_cache, "get_file_cache", compilation_cache.get_file_cache)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    compile_cache.enable_compilation_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    yield Path(jax.config.jax_compilation_cache_dir)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def start_again() -> float:
    """Compile a program, or load it, as a new process does; and run it."""
    jax.clear_caches()
    return float(jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x))(jnp.arange(16.0)))


def flip(position, content):
    content = bytearray(content)
    content[int(position * (len(content) - 1))] ^= 0x10
    return bytes(content)


DAMAGE = {"first": functools.partial(flip, 0.0), "middle": functools.partial(flip, 0.5),
          "last": functools.partial(flip, 1.0), "cut": lambda content: content[:len(content) // 2],
          "nothing": lambda content: b"", "zeros": lambda content: bytes(len(content))}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_program_is_compiled_again(folder, recwarn, damage):
    expected = start_again()
    written = {file: file.read_bytes() for file in folder.iterdir()}
    assert written and all(file.suffix == ".program" for file in written)
    assert start_again() == expected and not recwarn.list  # found and loaded
    for file, content in written.items():
        file.write_bytes(DAMAGE[damage](content))
    assert start_again() == expected
    said = [str(recwarn.pop(UserWarning).message) for _ in written]
    assert all(any(f"{file} is damaged" in text for text in said) for file in written)
    assert start_again() == expected and not recwarn.list  # and replaced


def test_it_is_loaded_not_compiled(folder, monkeypatch):
    start_again()

    def refuse(*args, **kwargs):
        raise AssertionError("compiled")

    monkeypatch.setattr("jax._src.compiler.backend_compile_and_load", refuse)
    start_again()
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(AssertionError, match="compiled"):
        start_again()


def test_a_full_disk_is_no_reason_to_stop(folder, monkeypatch):
    def replace(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.warns(UserWarning, match="No space left on device"):
        assert start_again()
    assert not list(folder.iterdir())
