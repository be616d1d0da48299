"""The batch script of a job in Slurm.

It maps exit statuses to what Slurm does next: 75 and 76 start the job again, unless it is to pause or to end; a crash
does so `retries` times; 0, 2, 77 and 130 end it. No setting of the cluster is needed.

srun tells only the highest status of all processes. So each process writes its own one with the time, and the first
failure counts (restarts/first_failure.py).
"""

import re
import shlex
from pathlib import Path

from jaxtrain.launch.job_record import RESTARTS, Job, exported
from jaxtrain.launch.job_spec import JobSpec
from jaxtrain.launch.restarts import idle_starts

_RUN = """\
# The address of the first node, as Slurm itself reaches it; one port for each job.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
export JAX_COORDINATOR_ADDRESS="$address:$((20000 + SLURM_JOB_ID % 10000))"

trap : TERM  # sent to the processes too, which save; this script goes on to say what happens next
{nodes}tasks=$((nodes * {processes}))  # SLURM_NTASKS is not, once a job was resumed on other nodes
ends={ends}.${{SLURM_RESTART_COUNT:-0}}  # another folder for each start, since NFS remembers what was in an old one
rm -rf {ends}.*
mkdir -p "$ends"
{srun} --nodes=$nodes --ntasks=$tasks bash -c \\
  'export JAX_NUM_PROCESSES=$SLURM_NTASKS JAX_PROCESS_ID=$SLURM_PROCID
  trap : TERM  # sent to the command too
  ends=$1; shift; "$@"; status=$?
  echo "${{EPOCHREALTIME:-$(date +%s)}} $SLURM_PROCID $status" 2>/dev/null > "$ends/$SLURM_PROCID"
  exit $status' run "$ends" \\
  {command}
status=$?

# The first failure counts; srun tells the highest status, which may be that of a process that only ended because of it.
final= crash= again= saved= count=0
while read -r _ rank code; do
  count=$((count + 1))
  case $code in
    0) ;;
    2|77|130) final=${{final:-$code $rank}} ;;
    75) saved=${{saved:-75 $rank}} ;;
    76) again=${{again:-76 $rank}} ;;
    134) if [ "$again$saved" ]; then again=${{again:-76 $rank}}; else crash=${{crash:-134 $rank}}; fi ;;
    *) crash=${{crash:-$code $rank}} ;;
  esac
done < <(cd "$ends" && cat $(seq 0 $((tasks - 1))) 2>/dev/null | LC_ALL=C sort -n)
rank=null
if [ "$final$crash" ] || {{ [ "$again$saved" ] && {{ [ $count -eq $tasks ] || [ $status -lt 128 ]; }}; }}; then
  read -r status rank <<< "${{final:-${{crash:-${{again:-$saved}}}}}}"
  [ $tasks -eq 1 ] || echo "process $rank of $tasks was the first to end early, with status $status"
fi  # else a process was killed with all that could tell of it
"""
_NODES = """\
nodes=$SLURM_JOB_NUM_NODES
"""
_FEWER = """\
for count in {counts}; do  # numbers of nodes with which the run can go on
  if [ $count -le $nodes ]; then nodes=$count; break; fi
done
"""
_NEXT = """\
state() {{ scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*JobState=\\([A-Z]*\\).*/\\1/p'; }}
again() {{  # Slurm ends this script while it waits
  case $(state) in
    RUNNING|SIGNALING) ;;  # Slurm may still be at it where the run was quick to save
    *) exit $status ;;  # somebody else has decided
  esac
  trap - TERM
  if [ "$1" = requeue ]; then
    echo "{{\\"time\\": $(date +%s), \\"status\\": $status, \\"process\\": $rank}}" >> {restarts}
  fi
  scontrol "$1" "$SLURM_JOB_ID"
  sleep 600
}}
case $(cat {stop} 2>/dev/null) in
  cancel) exit 0 ;;
  pause) again requeuehold ;;
esac
case $status in
  0|2|77|130) exit $status ;;  # done, a mistake, a limit, Ctrl-C
  75|76) {bounded}again requeue ;;
esac
echo >> {crashes}
if [ "$(wc -l < {crashes})" -le {retries} ]; then
  again requeue
fi
exit $status
"""
_BOUNDED = """\
if [ $SECONDS -lt {brief} ]; then echo >> {briefs}; else rm -f {briefs}; fi
    if [ -f {briefs} ] && [ "$(wc -l < {briefs})" -gt {most} ]; then
      echo "{most} restarts in a row of less than {brief} seconds each: the job ends"
      exit 77
    fi
    """  # of a command of one's own; a run of jaxtrain counts its steps, and ends itself


def script(job: Job) -> str:
    """Return the batch script."""
    spec = job.spec
    parts = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options(job)), "",
             f"cd {shlex.quote(job.directory)} || exit 2", *exported(spec),
             *(f"export {name}={shlex.quote(value)}" for name, value in idle_starts.variables(job).items()),
             *[f"export JAXTRAIN_FULL_PROCESSES={spec.nodes * spec.processes}"] * ranged(spec)]
    srun, command = ["srun", "--kill-on-bad-exit=1", "--export=ALL"], shlex.join(job.command)
    if spec.cpus_per_process:
        srun.append(f"--cpus-per-task={spec.cpus_per_process}")  # which srun does not take over from sbatch
    if ranged(spec):
        srun.append(f"--ntasks-per-node={spec.processes}")
    if spec.accelerators_per_node:
        srun.append(f"--gpus-per-task={spec.accelerators_per_node // spec.processes}")
    if enroot(spec):
        srun += _enroot(job)
    elif spec.image:
        command = f"{shlex.join(_apptainer(job))} {command}"
    ends, crashes, briefs, restarts, stop = (shlex.quote(f"{path}") for path in (
        job.folder / "ends", job.folder / "crashes", job.folder / "brief", job.folder / RESTARTS, job.pause_file))
    bounded = "" if idle_starts.counted(job) else _BOUNDED.format(
        brief=idle_starts.BRIEF_S, briefs=briefs, most=idle_starts.MOST)
    counts = [f"{count}" for count in reversed(job.about.get("node_counts", []))]
    nodes = _NODES + (_FEWER.format(counts=" ".join(counts)) if counts else "")
    run = _RUN.format(srun=shlex.join(srun), command=command, processes=spec.processes, nodes=nodes, ends=ends)
    return "\n".join([*parts, *spec.setup, "", run, _NEXT.format(
        stop=stop, crashes=crashes, retries=spec.retries, restarts=restarts, bounded=bounded)])


def enroot(spec: JobSpec) -> bool:
    """Return whether the image is one of enroot's."""
    return spec.image.endswith(".sqsh")


def _enroot(job: Job) -> list[str]:
    """Return what tells srun to run tasks in the job's image, by pyxis, with the folders that a run needs."""
    binds = [f"{what}:{path}" for path, what in job.spec.mounts.items()] + [f"{path}:{path}" for path in _own(job)]
    return [f"--container-image={job.spec.image}", f"--container-mounts={','.join(binds)}",
            f"--container-workdir={job.directory}"]


def _own(job: Job) -> list[str]:
    """Return the folders that a run needs and that are on no mount."""
    return [path for path in (f"{job.workdir}", job.directory)
            if not any(Path(path).is_relative_to(mount) for mount in job.spec.mounts)]


def _apptainer(job: Job) -> list[str]:
    """Return what runs a command in the job's image, with the folders that a run needs."""
    spec = job.spec
    image = spec.image if "://" in spec.image or spec.image.endswith(".sif") else f"docker://{spec.image}"
    binds = [f"--bind={what}:{path}" for path, what in spec.mounts.items()] + [f"--bind={path}" for path in _own(job)]
    return ["apptainer", "exec", *["--nv"] * bool(spec.accelerators_per_node), *binds, image]


def options(job: Job) -> list[str]:
    """Return what sbatch is told."""
    spec, nodes, tasks, cpus = job.spec, f"{job.spec.nodes}", job.spec.processes, job.spec.cpus_per_process
    if ranged(spec):  # asked for tasks of a node, Slurm gives as few nodes as it may, however many are free
        nodes, tasks, cpus = f"{spec.min_nodes}-{spec.nodes}", "", tasks * max(1, cpus)
    kind = f"{spec.accelerator}:" if spec.accelerator else ""
    found = {"job-name": job.name, "nodes": nodes, "ntasks-per-node": tasks,
             "gpus-per-node": f"{kind}{spec.accelerators_per_node}" if spec.accelerators_per_node else "",
             "cpus-per-task": cpus or "",
             "mem": f"{spec.memory_gb * 1000:.0f}M" if spec.memory_gb else "",
             "time": _duration(spec.seconds), "partition": spec.queue, "account": spec.account, "qos": spec.priority,
             "mail-user": spec.notify, "mail-type": "END,FAIL" if spec.notify else "",
             "signal": f"TERM@{spec.grace_s}", "output": f"{job.output}".replace("%", "%%"), "open-mode": "append",
             "export": "NIL"}
    return [f"--{name}={_escaped(f'{value}')}" for name, value in found.items() if value != ""] + [
        "--requeue", *spec.extra]


def _escaped(text: str) -> str:
    """Return a text as sbatch reads it in a line of a script, which is not quite how a shell does."""
    return '"' + re.sub(r'["\\]', r"\\\g<0>", text) + '"' if re.search(r"""[\s'"#\\]""", text) else text


def ranged(spec: JobSpec) -> bool:
    """Return whether a job may begin on fewer nodes."""
    return 0 < spec.min_nodes < spec.nodes


def _duration(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    return f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}" if seconds else ""
