"""Eight virtual CPU devices and a cache of their own for all tests, set before JAX starts."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
if "JAXTRAIN_CACHE" not in os.environ:
    os.environ["JAXTRAIN_CACHE"] = tempfile.mkdtemp(prefix="jaxtrain-tests-")
    atexit.register(shutil.rmtree, os.environ["JAXTRAIN_CACHE"], ignore_errors=True)

from tests.s3 import _network, _server, bucket, impatient, network  # noqa: F401
