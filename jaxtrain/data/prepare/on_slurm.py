"""Write a script that prepares a corpus on a Slurm cluster: an array of jobs, one per part, and a final job.

It needs only Slurm's own commands, and no process that runs meanwhile. The final job does whatever other jobs did not
do because they failed or never ran; a script that is submitted again continues.
"""

import os
import shlex
import sys
from collections.abc import Sequence

SCRIPT = '''\
#!/usr/bin/env bash
# Prepares a corpus in @PARTS parts. To submit: bash THIS_FILE [flags of sbatch, such as --partition=cpu]
#SBATCH --job-name=prepare
#SBATCH --cpus-per-task=@WORKERS
#SBATCH --requeue
set -euo pipefail

if [ "${1:-}" = run ]; then  # in a job: a part, where it is one of an array; else all that is missing
  shift
  cd @FOLDER
  exec @COMMAND \\
    --workers="$SLURM_CPUS_PER_TASK" ${SLURM_ARRAY_TASK_ID:+"--part=$SLURM_ARRAY_TASK_ID/@PARTS"} "$@"
fi

flags=(--parsable --kill-on-invalid-dep=yes "$@")
submit() { local job; job=$(sbatch "${flags[@]}" "$@") && echo "${job%%;*}"; }
@STAGES
echo "job $tokens: @PARTS parts; job $last finishes, and its log has the summary"
'''
DUPLICATES = '''\
hashes=$(submit --array=0-@LAST "$0" run --stage=duplicates)
compared=$(submit --dependency=afterany:$hashes "$0" run --stage=duplicates)
tokens=$(submit --dependency=afterok:$compared --array=0-@LAST "$0" run)
'''
TOKENS = '''\
tokens=$(submit --array=0-@LAST "$0" run)
'''
LAST = 'last=$(submit --dependency=afterany:$tokens "$0" run)'


def render(flags: Sequence[str], parts: int, workers: int, deduplicate: bool) -> str:
    """Return the script that does what `jaxtrain prepare` with these flags does in this folder, by this interpreter."""
    command = [sys.executable, "-m", "jaxtrain", "prepare", *flags]
    script = SCRIPT.replace("@STAGES", (DUPLICATES if deduplicate else TOKENS) + LAST)
    for name, value in (("LAST", parts - 1), ("PARTS", parts), ("WORKERS", workers),
                        ("FOLDER", shlex.quote(os.getcwd())), ("COMMAND", shlex.join(command))):
        script = script.replace(f"@{name}", str(value))
    return script
