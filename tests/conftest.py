"""Eight virtual CPU devices, quickly compiled, and a cache of their own for all tests, set before JAX starts."""

import atexit
import contextlib
import gc
import os
import shutil
import signal
import tempfile

from tests.tiny import virtual_devices

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {virtual_devices(8)}"
if "JAXTRAIN_CACHE" not in os.environ:
    os.environ["JAXTRAIN_CACHE"] = tempfile.mkdtemp(prefix="jaxtrain-tests-")
    atexit.register(shutil.rmtree, os.environ["JAXTRAIN_CACHE"], ignore_errors=True)

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background job, and in all that it starts
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import pytest

from jaxtrain import compile_cache
from tests.forked import _ended, forked  # noqa: F401
from tests.kernels.interpreted import interpreted  # noqa: F401
from tests.s3 import _network, _server, bucket, impatient, network  # noqa: F401


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One cache of compiled programs for the whole session, for the processes that a test starts too."""
    before = jax.config.jax_compilation_cache_dir
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        compile_cache.enable_compilation_cache()
        yield
    jax.config.update("jax_compilation_cache_dir", before)


# Files that take longest or wait for others, so that no worker is left alone with them at the end.
FIRST = ("tests/test_readme.py", "tests/launch/", "tests/observe/trackers/", "tests/tuning/")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Each test is in one tier: -m slow would also run what is marked exhaustive beside it.

    Of those that are chosen, one in CI_EVERY is kept, for .ci/run on a slow machine; the others count as deselected.
    """
    both = [item.nodeid for item in items if {"slow", "exhaustive"} <= {mark.name for mark in item.iter_markers()}]
    if both:
        raise pytest.UsageError(f"these are marked slow and exhaustive: {', '.join(both)}")
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    yield
    every = int(os.environ.get("CI_EVERY", "1"))
    config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n % every])
    items[:] = items[::every]


def pytest_collection_finish():
    """Thousands of tests and all modules stay to the end: the collector of garbage need not look for any among them."""
    gc.freeze()
