"""The sum of several devices' arrays as each codec makes it, in plain NumPy: no mesh, one device after the other."""

import numpy as np

from tests.parallel.compression import plain_codecs


class Devices:
    """The state that the devices on one axis remember of one array."""

    def __init__(self, codec, shape, peers, right=None):
        self.codec, self.right, self.count = codec, right, 0
        self.errors = [np.zeros(shape, np.float32) for _ in range(peers)]

    def summed(self, given):
        """Return what all of them get when each gives its array."""
        peers = len(given)
        wanted = [x + error for x, error in zip(given, self.errors, strict=True)]
        if self.codec.name == "exact":
            return sum(given)
        if self.codec.name == "power_sgd":
            total, self.right, self.errors = low_rank(self.codec, wanted, self.right)
            return total
        arrived = [plain_codecs.arrived(self.codec, x, self.count)[0] for x in wanted]
        self.count += 1
        self.errors = [x - got for x, got in zip(wanted, arrived, strict=True)]
        total = sum(arrived)
        if self.codec.name not in ("int8", "int4"):
            return total
        # Whole blocks for every device; each rounds its part of the sum again and remembers what that loses.
        rounded, _ = plain_codecs.arrived(self.codec, total)
        blocks = -(-total.size // self.codec.block)
        part = -(-blocks // peers) * self.codec.block
        lost = (total - rounded).reshape(-1)
        for device, error in enumerate(self.errors):
            own = slice(device * part, (device + 1) * part)
            error.reshape(-1)[own] += lost[own]
        return rounded


def low_rank(codec, wanted, rights):
    """Return the sum, the right factors, what each device remembers."""
    shape, out, factors, errors = wanted[0].shape, [], [], [[] for _ in wanted]
    matrices = [np.float64(x).reshape(codec.matrices(shape)) for x in wanted]
    for number, right in enumerate(rights):
        mine = [x[number] for x in matrices]
        left = plain_codecs.orthonormal(sum(mine) @ np.float64(right))
        own = [x.T @ left for x in mine]
        factors.append(sum(own))
        out.append(left @ factors[-1].T)
        for error, x, right in zip(errors, mine, own, strict=True):
            error.append(x - left @ right.T)
    return np.stack(out).reshape(shape), np.stack(factors), [np.stack(error).reshape(shape) for error in errors]
