#!/bin/bash
# Two teams share the GPUs of a Slurm cluster: each is sure of SHARE, and uses what is idle besides for jobs that may be
# stopped. An administrator runs it once, with the users of each team; slurm.conf has to say what docs/launch-teams.md
# names.
#     RESEARCH="ann bob" PRODUCT="cleo" SHARE=gres/gpu=32 bash examples/launch/slurm-teams.sh
set -euo pipefail
add() { sacctmgr --immediate add "$@"; }

add qos spare priority=0 preemptmode=requeue gracetime=120  # what is idle, as long as it is; the run saves, and waits
for team in research product; do
  add qos "$team" priority=100 preempt=spare grptres="$SHARE"  # what the team is sure of
  add account "$team" fairshare=1  # of those who wait, the team that has used less comes first
done
for user in $RESEARCH; do
  add user name="$user" account=research qos=research,spare defaultqos=research
done
for user in $PRODUCT; do
  add user name="$user" account=product qos=product,spare defaultqos=product
done
