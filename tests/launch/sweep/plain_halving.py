"""Asynchronous successive halving as it was published, over a table of curves: Algorithm 2 of Li et al. 2018."""

import heapq

FACTOR, RUNGS, STEPS = 3, [3, 9, 27], 81


def published(curves, workers: int) -> list[tuple[int, int]]:
    """Return the jobs (trial, rung) that workers take, in the paper's own words: get_job(), whenever one is free."""
    finished: list[dict[int, float]] = [{} for _ in [*RUNGS, STEPS]]  # of each rung, what its trials reached
    promoted: list[set[int]] = [set() for _ in finished]
    steps, jobs, free, clock, begun = [*RUNGS, STEPS], [], list(range(workers)), 0, 0
    taken = []

    def get_job():
        nonlocal begun
        for k in reversed(range(len(RUNGS))):
            top = sorted(finished[k], key=lambda t: (finished[k][t], t))[:len(finished[k]) // FACTOR]
            candidates = [t for t in top if t not in promoted[k]]
            if candidates:
                promoted[k].add(candidates[0])
                return candidates[0], k + 1
        if begun < len(curves):
            begun += 1
            return begun - 1, 0
        return None

    while True:
        while free and (job := get_job()):
            free.pop()
            taken.append(job)
            trial, k = job
            heapq.heappush(jobs, (clock + steps[k] - (steps[k - 1] if k else 0), trial, k))
        if not jobs:
            return taken
        clock, trial, k = heapq.heappop(jobs)
        finished[k][trial] = curves[trial][steps[k]]
        free.append(0)
