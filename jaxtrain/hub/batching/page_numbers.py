"""The pages of the cache that are free, and how many texts have each of the others."""

from collections import Counter

from jaxtrain.hub.batching.rounding import bucket


class PageNumbers:
    """The pages of each of the parts that the mesh cuts a batch into; all have the same number of them."""

    def __init__(self, parts: int):
        self.size, self.most = 0, 0  # of a part; the most that were in use at once, of all parts together
        self.free: list[list[int]] = [[] for _ in range(parts)]
        self.held: list[Counter[int]] = [Counter() for _ in range(parts)]

    def grown(self, wanted: list[int], limit: int = 2**30) -> bool:
        """Have so many free pages in each part; return whether there are more then: twice as many, or `limit`."""
        lacking = max(many - len(free) for many, free in zip(wanted, self.free, strict=True))
        if lacking <= 0:
            return False
        before, self.size = self.size, max(self.size + lacking, min(bucket(self.size + lacking), limit))
        for free in self.free:
            free[:0] = range(self.size - 1, before - 1, -1)
        return True

    def take(self, part: int, many: int) -> list[int]:
        """Return free pages, which are then in use."""
        found = [self.free[part].pop() for _ in range(many)]
        self.share(part, found)
        self.most = max(self.most, self.in_use)
        return found

    def share(self, part: int, pages: list[int]) -> None:
        """Note that one more text has these pages."""
        self.held[part].update(pages)

    def release(self, part: int, pages: list[int]) -> None:
        """Note that one text less has these pages; those that none has are free."""
        self.held[part].subtract(pages)
        for page in pages:
            if not self.held[part][page]:
                del self.held[part][page]
                self.free[part].append(page)

    @property
    def in_use(self) -> int:
        """The number of pages that texts have."""
        return sum(map(len, self.held))
