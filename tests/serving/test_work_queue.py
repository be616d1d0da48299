"""The queue of a training service: order, bounds, calls that come twice or never."""

import threading

import pytest

from jaxtrain.errors import UserError
from jaxtrain.serving import work_queue
from jaxtrain.serving.work_queue import Refused, Work, WorkQueue


@pytest.fixture
def queue():
    made = WorkQueue(most=4, most_bytes=1000, together=3)
    yield made
    made.close()


@pytest.fixture
def gate(queue):
    """Keeps the thread busy until it is set."""
    begun, go = threading.Event(), threading.Event()
    queue.submit("gate", "me", 1, Work(lambda items: [begun.set(), go.wait(60)][:1]))
    begun.wait(60)
    yield go
    go.set()


def noting(seen, name):
    return Work(lambda items: [seen.append(name) or {"name": name}])


def done(answer):
    assert answer.ready.wait(60)
    return answer


def test_calls_of_a_model_run_in_the_order_of_their_numbers(queue):
    """They may arrive in any order, and another model does not wait for them."""
    seen = []
    last = [queue.submit(f"a:{n}", "me", 1, noting(seen, n), "a", n) for n in (3, 2)]
    done(queue.submit("b:1", "me", 1, noting(seen, "b"), "b", 1))
    assert seen == ["b"] and not last[0].ready.is_set()
    queue.submit("a:1", "me", 1, noting(seen, 1), "a", 1)
    done(last[0])
    assert seen == ["b", 1, 2, 3]


def test_a_call_that_is_sent_again_runs_once(queue):
    """Its answer was lost, and the client has sent it again."""
    seen = []
    first = done(queue.submit("a:1", "me", 1, noting(seen, 1), "a", 1))
    assert queue.submit("a:1", "me", 1, noting(seen, 1), "a", 1) is first
    assert seen == [1]
    with pytest.raises(Refused, match="not a call of yours"):
        queue.submit("a:1", "another", 1, noting(seen, 1), "a", 1)
    assert queue.answer("a:1", "another") is None
    with pytest.raises(Refused, match="not the next one, which is 2"):
        queue.submit("a:0", "me", 1, noting(seen, 0), "a", 0)


def test_calls_and_bytes_that_wait_are_bounded(queue, gate):
    for n in range(4):
        queue.submit(f"{n}", "me", 1, noting([], n))
    with pytest.raises(Refused, match="4 calls wait already") as refused:
        queue.submit("5", "me", 1, noting([], 5))
    assert refused.value.status == 429
    gate.set()
    done(queue.answer("3", "me"))
    with pytest.raises(Refused, match="above --queue_mib"):
        queue.submit("6", "me", 10**6, noting([], 6))


def test_answers_make_room_once_they_are_fetched(queue):
    for n in range(40):
        done(queue.submit(f"{n}", "me", 1, Work(lambda items: [b"x" * 300]))).fetched = True
    assert queue.answer("0", "me") is None and queue.answer("39", "me").content == b"x" * 300
    done(queue.submit("kept", "me", 1, Work(lambda items: [b"x" * 600])))
    with pytest.raises(Refused, match="nobody has fetched"):
        queue.submit("more", "me", 500, noting([], 0))


def test_an_answer_that_nobody_comes_for_is_forgotten(queue, monkeypatch):
    done(queue.submit("left", "me", 1, Work(lambda items: [b"x" * 900])))
    monkeypatch.setattr(work_queue, "KEPT_S", 0.0)
    done(queue.submit("next", "me", 500, noting([], 0)))
    assert queue.answer("left", "me") is None


def test_a_call_whose_predecessor_never_comes_fails(queue, monkeypatch):
    """Its client has given up that one; those that follow go on."""
    seen = []
    late = queue.submit("a:2", "me", 1, noting(seen, 2), "a", 2)
    after = queue.submit("a:3", "me", 1, noting(seen, 3), "a", 3)
    assert not queue.wait(late, 0)
    monkeypatch.setattr(work_queue, "GAP_S", 0.0)
    assert queue.wait(late, 0) and "call 1 of a never arrived" in late.error
    done(after)
    assert seen == [3]


def test_calls_of_clients_that_are_gone_take_no_room_for_ever(queue, monkeypatch):
    """Nobody asks for them again."""
    seen = []
    for number in range(2, 5):
        queue.submit(f"a:{number}", "me", 1, noting(seen, number), "a", number)
    queue.submit("b:2", "me", 1, noting(seen, "b"), "b", 2)
    with pytest.raises(Refused, match="4 calls wait already"):
        queue.submit("c:1", "another", 1, noting(seen, "c"), "c", 1)
    monkeypatch.setattr(work_queue, "GAP_S", 0.0)
    done(queue.submit("c:1", "another", 1, noting(seen, "c"), "c", 1))
    assert "c" in seen


def test_work_of_a_group_runs_together_as_far_as_there_is_room(queue, gate):
    seen = []

    def run(items):
        seen.append(list(items))
        return items

    answers = [queue.submit(f"{n}", "me", 1, Work(run, n, group="g" if n != 1 else None)) for n in range(4)]
    gate.set()
    assert [done(one).content for one in answers] == [0, 1, 2, 3]
    assert seen == [[0, 2, 3], [1]]


def test_a_cancelled_call_does_not_run(queue, gate):
    seen = []
    left, kept = (queue.submit(f"{n}", "me", 1, noting(seen, n)) for n in range(2))
    left.cancelled = True
    gate.set()
    done(kept)
    assert seen == [1] and left.error == "the call was cancelled"


def test_errors_are_answers_and_the_thread_goes_on(queue, capsys):
    def fail(error):
        def run(items):
            raise error
        return Work(run)

    mine = done(queue.submit("user", "me", 1, fail(UserError("key", "it is wrong", "mend it"))))
    assert (mine.error, mine.category) == ("key: it is wrong; mend it", "user")
    ours = done(queue.submit("server", "me", 1, fail(RuntimeError("broken"))))
    assert (ours.error, ours.category) == ("RuntimeError in the server: broken", "server")
    assert done(queue.submit("next", "me", 1, noting([], 1))).content == {"name": 1}
    assert "RuntimeError: broken" in capsys.readouterr().err


def test_a_queue_that_closes_answers_what_waits(gate, queue):
    waiting = queue.submit("waiting", "me", 1, noting([], 1))
    held = queue.submit("a:2", "me", 1, noting([], 1), "a", 2)
    threading.Thread(target=queue.close, daemon=True).start()
    assert "stopping" in done(waiting).error and "stopping" in done(held).error
    gate.set()
    with pytest.raises(Refused, match="stopping"):
        queue.submit("more", "me", 1, noting([], 1))
