#!/usr/bin/env bash
# Wheels for a machine without a package index that has Python 3.12, JAX 0.11.2, flax, optax, orbax-checkpoint and torch:
# what jaxtrain needs beside those, and tokamax to compare with, into a folder (default .whl), and the commit, for a copy
# without a checkout.
# There, where a command may take ten minutes only, in a folder whose files come back (an earlier results file among them,
# so that what it has is not measured again, and what accelerator_plans.py planned for it):
#     python3 -m pip install -q --no-index --no-deps --target /tmp/site .whl/*.whl
#     PYTHONPATH=/tmp/site JAXTRAIN_COMMIT=$(cat .whl/commit) python3 tools/device/accelerator.py --minutes=9 \
#         --results=FOLDER/h100.jsonl
set -euo pipefail
folder=${1:-.whl}
mkdir -p "$folder"
platforms=()
for version in 2_17 2_24 2_27 2_28; do platforms+=(--platform "manylinux_${version}_x86_64"); done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
    --platform manylinux2014_x86_64 -d "$folder" grain==0.2.18 array-record==0.8.6 ml-collections==1.1.0 \
    tokamax==0.0.17 qwix==0.1.8 einshape==1.0 immutabledict==4.3.1 jaxtyping==0.3.11 wadler-lindig==0.1.8 \
    tensorboardx==2.6.5 tqdm==4.70.1 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 \
    typing-inspection==0.4.5
python3 -m pip wheel -q --no-deps -w "$folder" portpicker==1.6.0  # published as source only
git -C "$(dirname "$0")/.." describe --always --match= --abbrev=40 --dirty > "$folder/commit" 2>/dev/null || true
ls -l "$folder"
