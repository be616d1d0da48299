"""Odd things in the place of a small file: entries that are not files, and files with other content."""

import os
import socket
import threading


def in_time(do, seconds=20):
    """Call a function on a thread of its own, so that a read that never ends fails the test."""
    found = []

    def run():
        try:
            found.append(do())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it does not end"
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(2**40)


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


def text(content):
    def write(path):
        path.write_text(content)

    write.__name__ = content[:20]
    return write


ODD = [fifo, device, folder, sparse]  # things that may lie in a file's place
WRONG = [text(content) for content in ("", "null", "[1]", "3", "[" * 100_000, '{"a":' * 100_000, "{", "\0" * 99)]
