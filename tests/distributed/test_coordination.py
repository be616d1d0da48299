"""Agreements of processes through JAX's coordination service: each gets the answer, and nothing of it stays there."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from jax._src.lib import _jax

from jaxtrain.distributed import coordination
from jaxtrain.errors import UserError
from tests.tiny import free_address

MANY = 3


class Mine:
    """The client of the process that a thread stands for."""

    def __getattr__(self, name):
        return getattr(_own.client, name)


_own = threading.local()


@pytest.fixture
def everywhere(monkeypatch):
    """Call a function in three processes at once, which are threads with clients of a real service."""
    address = free_address()
    service = _jax.get_distributed_runtime_service(address, MANY)
    clients = [_jax.get_distributed_runtime_client(address, process, shutdown_on_destruction=False)
               for process in range(MANY)]
    with ThreadPoolExecutor(MANY) as pool:
        [*pool.map(lambda client: client.connect(), clients)]
        monkeypatch.setattr(coordination, "jax", SimpleNamespace(
            process_count=lambda: MANY, process_index=lambda: _own.me,
            _src=SimpleNamespace(distributed=SimpleNamespace(global_state=SimpleNamespace(client=Mine())))))

        def call(function):
            def of(process):
                _own.me, _own.client = process, clients[process]
                return function(process)
            return [*pool.map(of, range(MANY))]

        call.keys = lambda: [key for key, _ in clients[0].key_value_dir_get("jaxtrain/")]
        yield call
        [*pool.map(lambda client: client.shutdown(), clients)]
    service.shutdown()


def test_answers_do_not_stay(everywhere):
    seen = []
    for turn in range(20):
        late = turn % MANY

        def agreed(process, turn=turn, late=late):
            if process == late:  # the others are done, or wait for it
                time.sleep(0.01)
            return coordination.together(f"turn/{turn}", process, lambda all: [turn, *all, "x" * 1000])

        assert everywhere(agreed) == [[turn, 0, 1, 2, "x" * 1000]] * MANY
        seen.append(everywhere.keys())
    assert seen == [[]] * 20


def test_a_reader_that_comes_later_finds_the_answer(everywhere):
    """Process 1 reads it long before process 2 does."""
    read, asked = threading.Event(), []

    def agreed(process):
        get = _own.client.blocking_key_value_get

        def waiting(key, timeout):
            if process == 2:
                assert read.wait(60)
                asked.append(everywhere.keys())
            return get(key, timeout)

        _own.client = SimpleNamespace(blocking_key_value_get=waiting, **{
            name: getattr(_own.client, name) for name in (
                "key_value_set", "key_value_delete", "key_value_increment")})
        found = coordination.together("late", process, sum)
        if process == 1:
            read.set()
        return found

    assert everywhere(agreed) == [3, 3, 3]
    assert asked == [["jaxtrain/late/answer", "jaxtrain/late/read"]] and everywhere.keys() == []


def test_refusals_do_not_stay_either(everywhere):
    def decide(_):
        raise UserError("a.key", "it is wrong", "mend it")

    def agreed(process):
        with pytest.raises(UserError, match=r"a\.key: it is wrong; mend it"):
            coordination.together("refused", process, decide)

    everywhere(agreed)
    assert everywhere.keys() == []
