"""An island that adds up units instead of training, as a process: python adding_island.py SETTINGS_AS_JSON.

Its outer state is the list of units in the log's order. It keeps its own progress in a checkpoint, which it writes now
and then, and goes on from there when it was killed: it does again what it did since, and offers it again.
"""

import hashlib
import json
import random
import sys
import time
from pathlib import Path

from jaxtrain.diloco import folder_meeting
from jaxtrain.diloco.meeting import Offer, Trimmed, Unanswered
from jaxtrain.diloco.network import fallback_meeting, tcp_meeting
from jaxtrain.files import atomic_files


class Island:
    def __init__(self, settings):
        self.index, self.units, self.workdir = settings["index"], settings["units"], Path(settings["workdir"])
        self.rng = random.Random()  # different after each restart
        tcp_meeting.PAUSE = folder_meeting.PAUSE = (0.02, 0.3)
        fallback_meeting.FALL_BACK_S, fallback_meeting.SILENCE_S = 0.5, 3.0
        fallback_meeting.AGAIN_S, fallback_meeting.LOOK_S = 0.3, (0.05, 0.3)
        self.mode = settings["mode"]
        self.meeting = self.reached(settings)
        self.checkpoint = self.workdir / f"{self.index}.json"
        self.position, self.done, self.tally = 0, 0, []
        if self.checkpoint.exists():
            self.position, self.done, self.tally = json.loads(self.checkpoint.read_text())
        self.sent = []

    def reached(self, settings):
        if settings.get("store"):
            return folder_meeting.FolderMeeting(settings["store"], self.index, sign=0.5)
        if settings.get("fallback"):
            return fallback_meeting.FallbackMeeting(settings["address"], settings["keys"], settings["fallback"],
                                                    self.index)
        return tcp_meeting.TcpMeeting(settings["address"], settings["keys"], self.index, silence=3.0, sign=0.5)

    def run(self):
        while self.done < self.units:
            time.sleep(self.rng.uniform(0, 0.04))
            self.exchange([self.index, self.done])
            self.done += 1
            if self.rng.random() < 0.3:
                atomic_files.write(self.checkpoint, json.dumps([self.position, self.done, self.tally]))
        while entries := self.meeting.entries(self.position, 0.0):
            self.apply(entries)
        atomic_files.write(self.checkpoint, json.dumps([self.position, self.done, self.tally]))

    def exchange(self, unit):
        """Offer a unit until it is in the log: after each entry without it in rounds, else when it was refused."""
        base = None
        while unit not in self.tally:
            if base != self.position:
                base = self.offer(unit)
            try:
                entries = self.meeting.entries(self.position, 1.0)
                mine = next((number for number, entry in enumerate(entries) if entry.has(self.index, base)), None)
                if self.mode == "sync":
                    self.apply(entries[:1])
                elif mine is None:
                    time.sleep(0.05 if entries else 0)  # it is still on its way
                else:
                    self.apply(entries[: mine + 1])
            except Unanswered:  # of a coordinator that takes its time to start: a run asks again, too
                continue
            except Trimmed:
                self.position, content = self.meeting.snapshot()
                self.tally = json.loads(content)

    def offer(self, unit):
        content = json.dumps([unit]).encode() + b" " * (unit[1] % 3 * 400_000)
        self.sent.append((Offer(self.index, self.position, 0, 1.0, hashlib.sha256(content).hexdigest(), 1, 1,
                                self.done == self.units - 1), content))
        self.meeting.offer(*self.sent[-1])
        if self.rng.random() < 0.2:
            self.meeting.offer(*self.rng.choice(self.sent))
        return self.position

    def apply(self, entries):
        contents = [[self.meeting.content(offer.sha256) for offer in entry.contributions] for entry in entries]
        for entry, units in zip(entries, contents, strict=True):
            assert entry.number == self.position + 1
            self.position = entry.number
            for content in units:
                self.tally += json.loads(content)
            with (self.workdir / f"{self.index}.log").open("a") as file:
                file.write(f"{self.position} {hashlib.sha256(json.dumps(self.tally).encode()).hexdigest()}\n")
            if self.position % 7 == 0 and entry.contributions and entry.contributions[0].island == self.index:
                self.meeting.put_snapshot(self.position, json.dumps(self.tally).encode())


if __name__ == "__main__":
    Island(json.loads(sys.argv[1])).run()
