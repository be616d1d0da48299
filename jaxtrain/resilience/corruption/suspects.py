"""Devices that were found to compute wrongly, in this start of a run or earlier ones."""

from collections.abc import Sequence
from pathlib import Path

import jax

from jaxtrain.distributed import exit_codes
from jaxtrain.distributed.coordination import Hosts
from jaxtrain.files.bounded_files import misfit
from jaxtrain.observe import events

_DEVICES = {"devices": [{"host": str, "id": int}]}


class Corrupted(exit_codes.RunExit):
    """Raised when the state is wrong on some device: nothing of it may be saved, and the last good checkpoint is used.
    """


class SuspectDevices:
    """Records suspect devices in `workdir/events.jsonl`; created and called in all processes alike."""

    def __init__(self, workdir: str | Path):
        self._workdir, self._hosts = workdir, Hosts()
        # Read now, not later: all processes must come to one exit status, and one of them writes to the file.
        self._before = {(device["host"], device["id"]) for event in events.events(workdir)
                        if event["kind"] == "corruption" and not misfit(event, _DEVICES) for device in event["devices"]}

    def accuse(self, devices: Sequence[jax.Device], what: str, **fields: object) -> Corrupted:
        """Record the suspect devices (in process 0) and return the exception to raise in every process."""
        hosts = self._hosts.of({device.process_index for device in devices})
        named = [{"id": device.id, "host": hosts[device.process_index], "process": device.process_index}
                 for device in devices]
        again = [device for device in named if (device["host"], device["id"]) in self._before]
        status = exit_codes.STOPPED if again else exit_codes.RESTART
        if jax.process_index() == 0:
            events.record(self._workdir, "corruption", devices=named, what=what, status=status, **fields)
        where = ", ".join(f"device {device['id']} (process {device['process']} on {device['host']})"
                          for device in named[:8])
        where += f" and {len(named) - 8} more" if len(named) > 8 else ""
        then = (f"device {again[0]['id']} on {again[0]['host']} was under suspicion before: take it out of service"
                if again else "start again from the last good checkpoint")
        return Corrupted(status, f"silent corruption: {what}; under suspicion: {where}; {then}")
