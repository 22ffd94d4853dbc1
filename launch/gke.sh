#!/usr/bin/env bash
# Fills launch/gke.yaml in from the environment and applies it with kubectl; --dry-run prints it instead.
#
#   NAME=t5 IMAGE=REGISTRY/pretrainax ACCELERATOR=tpu-v5-lite-podslice TOPOLOGY=4x4 HOSTS=4 CHIPS_PER_HOST=4 \
#     CLAIM=filestore launch/gke.sh [--dry-run] -- --config=configs/t5_base.py --workdir=/shared/t5
#
# What must be set:
#   NAME            of the JobSet
#   IMAGE           this folder installed with the extra tpu, as its working directory
#   ACCELERATOR     tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice, ...: the node pool's label
#   TOPOLOGY        chips of a slice, as 4x4 or 4x4x8
#   HOSTS           of a slice
#   CHIPS_PER_HOST  on each of them
#   CLAIM           a PersistentVolumeClaim that all pods can write (ReadWriteMany), seen as /shared
# What may be: SLICES (1), RESTARTS (10). The cluster needs the JobSet controller (jobset.sigs.k8s.io).
set -euo pipefail

dry=''
[[ ${1-} == --dry-run ]] && dry=yes && shift
[[ ${1-} == -- ]] && shift
[[ " $* " == *' --config='* && " $* " == *' --workdir=/shared/'* ]] ||
  { echo "gke.sh: after -- come the arguments of pretrainax.main, among them --config= and --workdir=/shared/..." >&2 && exit 2; }

missing=''
for name in NAME IMAGE ACCELERATOR TOPOLOGY HOSTS CHIPS_PER_HOST CLAIM; do
  [[ ${!name-} ]] || missing+=" $name"
done
[[ ! $missing ]] || { echo "gke.sh: not set:$missing; what they are stands at the top of launch/gke.sh" >&2 && exit 2; }
: "${SLICES:=1}" "${RESTARTS:=10}"

ARGUMENTS=''
for argument in "$@"; do # as YAML's single-quoted strings
  ARGUMENTS+="${ARGUMENTS:+, }'${argument//\'/\'\'}'"
done
ARGUMENTS="[$ARGUMENTS]"

text=$(<"$(dirname "$0")/gke.yaml")
for name in NAME IMAGE ACCELERATOR TOPOLOGY HOSTS CHIPS_PER_HOST CLAIM SLICES RESTARTS ARGUMENTS; do
  text=${text//"\${$name}"/"${!name}"}
done
if [[ $dry ]]; then echo "$text"; else kubectl apply -f - <<<"$text"; fi
