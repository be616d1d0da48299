"""Spare machines take the place of lost ones, and no more of them than there are."""

import random

from jaxtrain.simulation.machine_room import MachineRoom


class Exact(random.Random):
    """Every repair takes its mean."""

    def expovariate(self, lambd=1.0):
        return 1 / lambd


def room(spares):
    return MachineRoom(spares, swap=60.0, repair=7200.0, dice=Exact())


def test_a_spare_replaces_a_machine_and_the_lost_one_becomes_a_spare():
    here = room(1)
    here.lose(3, 100.0)
    assert here.back(3) == 160.0 and here.missing([2, 3], 150.0) == [3] and here.missing([2, 3], 160.0) == []
    here.lose(5, 200.0)  # the spare is in use, and its successor is not repaired yet
    assert here.back(5) == 7300.0 + 60.0, "the one lost at 100 s is ready first"
    here.lose(6, 20_000.0)
    assert here.back(6) == 20_060.0, "both are repaired by then"


def test_without_a_spare_a_machine_is_missing_until_it_is_repaired():
    here = room(0)
    here.lose(0, 100.0)
    assert here.back(0) == 7300.0 and here.back(1) == 0.0
