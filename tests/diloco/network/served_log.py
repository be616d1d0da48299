"""A log of islands and what serves it, in the process of a test."""

import hashlib
import threading

from jaxtrain.diloco import folder_meeting
from jaxtrain.diloco.coordinator import Policy
from jaxtrain.diloco.folder_meeting import Bridge
from jaxtrain.diloco.meeting import Offer
from jaxtrain.diloco.network import certificates, fallback_meeting, tcp_meeting
from jaxtrain.diloco.network.fallback_meeting import FallbackMeeting
from jaxtrain.diloco.network.meeting_server import MeetingServer
from jaxtrain.diloco.outer_log import OuterLog
from tests.diloco.network.cutting_proxy import CuttingProxy


class Served:
    """A log and its server, in this process; `stop` and `start` are what a restart is."""

    def __init__(self, folder, keys, policy):
        self.folder, self.keys, self.policy, self.port = folder, keys, policy, 0
        self.start()

    def start(self):
        self.log = OuterLog(self.folder, self.policy)
        self.server = MeetingServer(self.log, f"127.0.0.1:{self.port}",
                                    certificates.context(self.keys, certificates.COORDINATOR), largest=2**25)
        self.port = self.server.port
        threading.Thread(target=self.server.accept, daemon=True).start()

    def stop(self):
        self.server.stop()
        self.log.close()


class Carried:
    """A thread that carries a log to a store and back, as the coordinator does with --store, until it is stopped."""

    def __init__(self, log, place):
        self.stopped, self.bridge = threading.Event(), Bridge(log, str(place))
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.stopped.wait(0.02):
            self.bridge.look()

    def stop(self):
        self.stopped.set()
        self.thread.join(600)


class Site:
    """A log that is reached through a proxy and at a store; island 0 uses both, island 1 the port alone."""

    def __init__(self, folder, keys, mode="sync", place=None):
        self.keys, self.place = keys, place or str(folder / "store")
        policy = Policy(mode=mode, islands=2 if mode == "sync" else 1, lease=1e9, timeout=1e9)
        self.served = Served(folder / "log", keys, policy)
        self.proxy = CuttingProxy(self.served.port).__enter__()
        self.address = f"127.0.0.1:{self.proxy.port}"
        self.bridge = Bridge(self.log, self.place)
        self.bridge.look()
        self.carried, self.opened = None, []

    @property
    def log(self):
        return self.served.log

    def carry(self):
        """Let the coordinator look into the store from now on."""
        self.carried = Carried(self.log, self.place)

    def island(self, number=0):
        self.opened.append(FallbackMeeting(self.address, self.keys, self.place, number, 2))
        return self.opened[-1]

    def other(self, base, content):
        self.log.offer(*offered(1, base, content))

    def close(self):
        for meeting in self.opened:
            meeting.close()
        if self.carried:
            self.carried.stop()
        self.proxy.__exit__()
        self.served.stop()

    def names(self):
        return {folder: self.bridge._store.names(folder) for folder in ("offers", "contents", "entries", "snapshots")}


def offered(island, base, content, **keys):
    return Offer(island, base, 0, 1.0, hashlib.sha256(content).hexdigest(), **keys), content


def fall_back_at_once(monkeypatch):
    """Let an island give up the port in parts of a second, and look for what it waits for as often."""
    monkeypatch.setattr(tcp_meeting, "PAUSE", (0.01, 0.05))
    monkeypatch.setattr(folder_meeting, "PAUSE", (0.01, 0.05))
    monkeypatch.setattr(fallback_meeting, "FALL_BACK_S", 0.2)
    monkeypatch.setattr(fallback_meeting, "AGAIN_S", 0.05)
    monkeypatch.setattr(fallback_meeting, "LOOK_S", (0.02, 0.05))
