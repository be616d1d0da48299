"""What a job costs, by the planner's prices: at most, from its time limit, and so far, from its run's ledger."""

from pathlib import Path

from jaxtrain.launch.job_spec import JobSpec


def dollars_an_hour(spec: JobSpec) -> float:
    """Return the price of all accelerators of a job; 0: it is not known."""
    from jaxtrain.plan.targets import TARGETS

    kind = spec.accelerator.lower()
    known = sorted((name for name in TARGETS if name != "cpu" and name in kind), key=len)
    return TARGETS[known[-1]].price * spec.nodes * spec.accelerators_per_node if known else 0.0


def at_most(spec: JobSpec) -> str:
    """Return what a job costs until its time limit, as a line; "": it has none, or no price is known."""
    rate = dollars_an_hour(spec)
    return f"at most ${rate * spec.seconds / 3600:,.2f} until it is stopped after {spec.time}, at ${rate:,.2f} an " \
           "hour" if rate and spec.seconds else ""


def so_far(spec: JobSpec, workdir: Path) -> str:
    """Return what the run in a workdir has cost; "": no price is known, or nothing has run."""
    from jaxtrain.observe.goodput import account, incarnations

    rate, starts = dollars_an_hour(spec), incarnations(workdir) if (workdir / "ledger").is_dir() else []
    if not rate or not starts:
        return ""
    seconds = account(starts).lived
    return f"${rate * seconds / 3600:,.2f} for {seconds / 3600:,.2f} h at ${rate:,.2f} an hour"
