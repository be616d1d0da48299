"""Code that must pass tests, for `rl.environment`: a line of `rl.prompts` has a "prompt" and "tests" in Python.

    {"prompt": [{"role": "user", "content": "Write a function double(x)."}], "tests": "assert double(2) == 4"}

The answer's code runs in a process of its own with little time and memory, and what fails is told to the model, which
may try again. It is no sandbox against an attacker: the code may read files and use the network of its machine.
"""

import re
import secrets
import signal
import subprocess
import sys
import tempfile

SECONDS, MEMORY, TRIES = 5, 2**30, 3
LIMITS = """import resource
for what, most in ((resource.RLIMIT_CPU, {seconds}), (resource.RLIMIT_AS, {memory}), (resource.RLIMIT_FSIZE, 2**20),
                   (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(what, (most, most))
del resource, what, most
"""
CODE = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


class CodeTests:
    """One task: answers until the tests pass, three at most."""

    def reset(self, record, seed):
        """Begin with the record's prompt."""
        self.tests, self.tries = record["tests"], 0

    def step(self, answer):
        """Run the answer's code with the tests; a later success is worth less."""
        self.tries += 1
        found = CODE.findall(answer)
        error = failure_of(f"{found[-1] if found else answer}\n{self.tests}")
        if not error:
            return "", 1.0 - 0.2 * (self.tries - 1), True
        return error, 0.0, self.tries == TRIES


def failure_of(program):
    """Return the last line of what a program says as it fails; "": it does not."""
    limits, end = LIMITS.format(seconds=SECONDS, memory=MEMORY), secrets.token_hex(8)
    program += f"\nimport sys; sys.stderr.write({end!r})"  # else code that exits would pass
    with tempfile.TemporaryFile() as said, tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run([sys.executable, "-I", "-c", limits + program], stdin=subprocess.DEVNULL, env={},
                                  cwd=folder, stdout=subprocess.DEVNULL, stderr=said, timeout=2 * SECONDS)
        except subprocess.TimeoutExpired:
            return "it takes too long"
        said.seek(0)
        text = said.read().decode(errors="replace").strip()
        if not done.returncode:
            return "" if end in text else "it ends before the tests do"
        if -done.returncode in (signal.SIGXCPU, signal.SIGKILL):  # by its limit of processor time
            return "it takes too long"
        lines = text.splitlines()
        return lines[-1][:200] if lines else f"it ends with status {done.returncode}"

