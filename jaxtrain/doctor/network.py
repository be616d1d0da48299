"""Check whether processes would find each other: the coordinator, this host's own name, proxies."""

import ipaddress
import os
import socket
from collections.abc import Collection, Mapping
from pathlib import Path

from jaxtrain.doctor.finding import Finding, fail, note, ok, warn
from jaxtrain.errors import UserError

CHECK = "coordinator"
SECONDS = 5.0
# In the order in which gRPC reads them; JAX uses gRPC to reach its coordinator.
_PROXIES = "grpc_proxy", "https_proxy", "http_proxy"


def split(address: str) -> tuple[str, int]:
    """Return host and port of an address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError("--coordinator", f"{address!r} is not host:port", "write it like node1:1234")
    return host.strip("[]"), int(port)


def coordinator(address: str) -> list[Finding]:
    """Check whether process 0 can be reached at an address, or could listen there if it is on this host."""
    host, port = split(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return [fail(CHECK, f"the name {host} is not known here ({error.strerror})",
                     "give its address, or add it to DNS or to /etc/hosts on all hosts")]
    ip = str(found[0][4][0])
    where = ip if host == ip else f"{host} ({ip})"
    findings = loops_back(host, ip)
    if _local(ip):
        return findings + own(ip, port)
    try:
        socket.create_connection((ip, port), SECONDS).close()
    except ConnectionRefusedError:
        return [*findings, note(CHECK, f"{where} answers, and no process listens on port {port}, as expected "
                                "before process 0 starts", "if it has started, see whether it has another port")]
    except TimeoutError:
        return [*findings, fail(CHECK, f"port {port} of {where} does not answer within {SECONDS:.0f} s",
                                "open the firewall between the hosts (all ports: processes and NCCL choose their own), "
                                "or give an address of the network they share")]
    except OSError as error:
        return [*findings, fail(CHECK, f"{where} cannot be reached ({error.strerror})",
                                "see whether that host is up and on this network")]
    return [*findings, ok(CHECK, f"a process listens at {where} on port {port}")]


def own(ip: str, port: int) -> list[Finding]:
    """Check whether process 0 could listen on a port of this host."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return [warn(CHECK, f"port {port} of this host cannot be used ({os.strerror(error.errno or 0)})",
                     "fine if the run is already up; else stop the program that listens there (ss -ltnp), or choose "
                     "another port")]
    return [ok(CHECK, f"{ip} is this host, and port {port} is free for process 0")]


def loops_back(host: str, ip: str) -> list[Finding]:
    """Check for a loopback address, which means another host on each of them."""
    if ipaddress.ip_address(ip.partition("%")[0]).is_loopback:
        return [note(CHECK, f"{host} ({ip}) is a loopback address, which every host takes for itself",
                     "fine for processes of one host; for several give an address that the others can reach")]
    return []


def hostname(name: str, several: bool) -> list[Finding]:
    """Check the address of this host's own name, on which Gloo, which sums over CPUs, listens."""
    level = warn if several else note
    try:
        ip = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return [level("host name", f"{name} is not known to this host itself ({error.strerror})",
                      f"add its address and {name} to /etc/hosts; runs of several hosts need it")]
    if ipaddress.ip_address(ip.partition("%")[0]).is_loopback:
        if not several:
            return [ok("host name", f"{name} is {ip}, which is enough for one host")]
        return [warn("host name", f"{name} is {ip} here, and CPU collectives would give other hosts that address",
                     f"put this host's own address before {name} in /etc/hosts; GPUs and TPUs are not affected")]
    return [ok("host name", f"{name} is {ip}")]


def several_hosts(environ: Mapping[str, str], host: str) -> bool:
    """Return whether the run seems to use several hosts; `host` is the coordinator's, or "" if none is given."""
    local = ("", "localhost")
    return environ.get("SLURM_NNODES", "1") != "1" or not (host in local or host == "::1" or host.startswith("127."))


def proxies(environ: Mapping[str, str], host: str = "") -> list[Finding]:
    """Check for proxies: gRPC would use one for the coordinator, and wait until JAX gives up."""
    name = next((name for wanted in _PROXIES for name in environ if name.lower() == wanted and environ[name]), None)
    if name is None:
        return []
    without = [part.strip() for variable in ("no_grpc_proxy", "no_proxy", "NO_PROXY")
               for part in environ.get(variable, "").split(",") if part.strip()]
    if host and spared(host, without):
        return [ok("proxy", f"{name} is set, and no_proxy exempts {host}")]
    level = warn if host else note
    return [level("proxy", f"{name} is set, and JAX may look for {host or 'its coordinator'} behind it",
                  f"export no_proxy={','.join([*without, host or 'HOST,10.0.0.0/8'])}")]


def spared(host: str, without: Collection[str]) -> bool:
    """Return whether no_proxy exempts a host: by its ending, by *, or by its network."""
    for part in without:
        if part == "*" or host == part.lstrip(".") or host.endswith(part if part.startswith(".") else f".{part}"):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(part, strict=False):
                return True
        except ValueError:
            continue
    return False


def interfaces() -> list[str]:
    """Return the network interfaces of this host, by name."""
    return [name for _, name in socket.if_nameindex()]


def infiniband() -> list[str]:
    """Return the InfiniBand adapters of this host, by name."""
    folder = Path("/sys/class/infiniband")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _local(ip: str) -> bool:
    """Return whether an address is this host's, which is the case if one can listen on it."""
    try:
        socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET).close()
    except OSError:
        return False
    return True
