"""A real Slurm on this machine: a controller and four nodes, in a folder of its own.

    python -m tests.launch.slurm.cluster FOLDER [--accounting]

starts one and runs until it is interrupted; `SLURM_CONF=FOLDER/slurm.conf` is all that commands need. It needs Debian's
packages slurm-wlm and munge (`apt-get install --no-install-recommends slurm-wlm munge`), and no other Slurm here. With
accounting there are accounts, QoS and limits; that needs slurmdbd and mariadb-server besides.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.launch.process_trees import descendants, kill, writers
from tests.launch.waiting import LIMIT

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch")
ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb")
PATH = f"{os.environ['PATH']}:/usr/sbin"
_CONF = """\
ClusterName=jaxtrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptMode=REQUEUE
JobRequeue=1
KillWait=30
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout={lost_after}
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/completed.log
PropagateResourceLimits=NONE
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
{accounting}
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL MaxTime=60 State=UP PriorityTier=100 PreemptMode=OFF
"""

_PLAIN = """\
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
MinJobAge=300
"""
_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge/socket
AccountingStorageEnforce=associations,qos,limits
PriorityType=priority/multifactor
PriorityWeightQOS=1000000
PriorityWeightFairshare=1000
PriorityCalcPeriod=1
PreemptType=preempt/qos
MinJobAge=2
"""
_DATABASE = """\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
AuthType=auth/munge
AuthInfo={folder}/munge/socket
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=x
StorageLoc=slurm_acct_db
LogFile={folder}/log/slurmdbd.log
PidFile={folder}/slurmdbd.pid
"""


class Cluster:
    """A running cluster; a context manager that ends it."""

    def __init__(self, folder: Path, nodes: int = 4, lost_after: int = 10, accounting: bool = False):
        self.folder, self.nodes, self.daemons = folder.absolute(), nodes, {}
        self.lost_after, self.accounting = lost_after, accounting
        self.environment = os.environ | {"SLURM_CONF": f"{self.folder / 'slurm.conf'}", "PATH": PATH}

    def __enter__(self) -> "Cluster":
        for name in ("munge", "state", "log", *(f"spool/n{i}" for i in range(1, self.nodes + 1))):
            (self.folder / name).mkdir(parents=True)
        os.chmod(self.folder / "munge", 0o700)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ports, host = _free_ports(self.nodes + 2), socket.gethostname().partition(".")[0]
        nodes = "\n".join(f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[i]} CPUs=2 "
                          f"RealMemory=4000 State=UNKNOWN" for i in range(1, self.nodes + 1))
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        known = {"host": host, "ports": ports, "port": ports[-1], "user": user, "folder": self.folder, "nodes": nodes,
                 "lost_after": self.lost_after}
        accounting = (_ACCOUNTING if self.accounting else _PLAIN).format(**known)
        (self.folder / "slurm.conf").write_text(_CONF.format(accounting=accounting, **known))
        (self.folder / "slurmdbd.conf").write_text(_DATABASE.format(**known))
        (self.folder / "slurmdbd.conf").chmod(0o600)
        munge = self.folder / "munge"
        try:
            self.start("munged", "munged", "--force", "--foreground", f"--key-file={key}", f"--socket={munge}/socket",
                       f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed")
            self._wait("munge gives no credentials", lambda: not subprocess.run(
                ["munge", "-n", f"--socket={munge}/socket"], capture_output=True).returncode)
            if self.accounting:
                self._start_accounting(user)
            self.start("slurmctld", "slurmctld", "-D", "-f", f"{self.folder}/slurm.conf")
            for number in range(1, self.nodes + 1):
                self.start_node(number)
            self._wait("the nodes are not idle", lambda: len(set(
                self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split())) == self.nodes)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        if "slurmctld" in self.daemons:
            for number in self.run("squeue", "-h", "-o", "%i").split():
                self.run("scancel", number)
            with contextlib.suppress(RuntimeError):
                self._wait("jobs do not end", lambda: not self.run("squeue", "-h").strip())
        last = ("slurmctld", "slurmdbd", "mariadbd", "munged")
        for name in sorted(self.daemons, key=lambda name: last.index(name) if name in last else -1):
            self.kill(name, gently=True)
        left = writers(self.folder / "log")  # slurmstepd of a node that was killed does not end
        kill([*left, *(pid for one in left for pid in descendants(one))])
        self._wait("processes are left", lambda: not writers(self.folder / "log"))

    def _start_accounting(self, user: str) -> None:
        """Start the database and what keeps the accounts in it, and make the cluster known there."""
        database = self.folder / "database"
        subprocess.run(["mariadb-install-db", "--no-defaults", f"--user={user}", f"--datadir={database}",
                        "--skip-test-db", "--auth-root-authentication-method=normal"], env=self.environment, check=True,
                       timeout=LIMIT, capture_output=True)
        self.start("mariadbd", "mariadbd", "--no-defaults", f"--user={user}", f"--datadir={database}",
                   f"--socket={database}/socket", "--skip-networking", "--innodb-buffer-pool-size=64M",
                   "--innodb-log-file-size=32M", "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0")
        made = ("create database slurm_acct_db; create user 'slurm'@'localhost' identified by 'x'; "
                "grant all on slurm_acct_db.* to 'slurm'@'localhost'")
        self._wait("there is no database", lambda: not subprocess.run(
            ["mariadb", "--no-defaults", "-uroot", f"--socket={database}/socket", "-e", made],
            capture_output=True).returncode)
        self.environment["MYSQL_UNIX_PORT"] = f"{database}/socket"
        self.start("slurmdbd", "slurmdbd", "-D")
        self._wait("there are no accounts", lambda: "jaxtrain" in self.run(
            "sacctmgr", "-i", "add", "cluster", "jaxtrain") + self.run("sacctmgr", "-n", "show", "cluster"))

    def start(self, name: str, *words: str) -> None:
        """Start a daemon."""
        with open(self.folder / "log" / f"{name}.out", "ab") as log:
            self.daemons[name] = subprocess.Popen(words, env=self.environment, stdout=log, stderr=log,
                                                  stdin=subprocess.DEVNULL, start_new_session=True)

    def start_node(self, number: int) -> None:
        """Start the daemon of a node, also after it was killed."""
        self.start(f"n{number}", "slurmd", "-D", "-N", f"n{number}", "-f", f"{self.folder}/slurm.conf")

    def kill(self, name: str, gently: bool = False) -> None:
        """End a daemon."""
        process = self.daemons.pop(name)
        with contextlib.suppress(subprocess.TimeoutExpired):
            if gently:
                process.terminate()
                process.wait(10)
        process.kill()
        process.wait()

    def run(self, *words: str) -> str:
        """Return what a command of Slurm prints."""
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=LIMIT).stdout

    def _wait(self, what: str, found) -> None:
        end = time.monotonic() + LIMIT
        while not found():
            dead = [name for name, process in self.daemons.items() if process.poll() is not None]
            if dead or time.monotonic() > end:
                logs = "\n".join(path.read_text(errors="replace")[-1000:] for path in (self.folder / "log").iterdir())
                raise RuntimeError(f"{what} ({', '.join(dead) or 'nothing'} ended): {logs}")
            time.sleep(0.1)


def missing(*more: str) -> list[str]:
    """Return the programs that are not installed."""
    return [name for name in (*NEEDED, *more) if shutil.which(name, path=PATH) is None]


def _free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    made = Cluster(Path(sys.argv[1]), accounting="--accounting" in sys.argv)
    with made as cluster, contextlib.suppress(KeyboardInterrupt):
        print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}", flush=True)
        while True:
            time.sleep(3600)
