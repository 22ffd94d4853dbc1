#!/usr/bin/env bash
# Fills launch/gke.yaml in from the environment and applies it with kubectl; --dry-run prints it instead.
#
#   NAME=t5 IMAGE=REGISTRY/pretrainax ACCELERATOR=tpu-v5-lite-podslice TOPOLOGY=4x4 HOSTS=4 CHIPS_PER_HOST=4 \
#     launch/gke.sh [--dry-run] -- --config=configs/t5_base.py --workdir=gs://mine/t5 --config.data.cache_dir=gs://mine/cache
#
# What must be set:
#   NAME            of the JobSet
#   IMAGE           this folder installed with the extras tpu and gcs, as its working directory
#   ACCELERATOR     tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice, ...: the node pool's label
#   TOPOLOGY        chips of a slice, as 4x4 or 4x4x8
#   HOSTS           of a slice
#   CHIPS_PER_HOST  on each of them
#   CLAIM           with --workdir=/shared/... alone: a PersistentVolumeClaim that all pods can write (ReadWriteMany)
# What may be: SLICES (1), RESTARTS (10). The cluster needs the JobSet controller (jobset.sigs.k8s.io), and for a bucket
# pods that may write there (Workload Identity). Of a bucket each node keeps its part on its own disk, over restarts.
set -euo pipefail

dry=''
[[ ${1-} == --dry-run ]] && dry=yes && shift
[[ ${1-} == -- ]] && shift
needed='NAME IMAGE ACCELERATOR TOPOLOGY HOSTS CHIPS_PER_HOST'
case " $* " in
  *' --workdir=/shared/'*) needed+=' CLAIM' MOUNT=/shared CACHE= VOLUME="persistentVolumeClaim: {claimName: ${CLAIM-}}" ;;
  *' --workdir='*://*) MOUNT=/cache CACHE=/cache VOLUME='hostPath: {path: /mnt/stateful_partition/pretrainax, type: DirectoryOrCreate}' ;;
  *) MOUNT='' ;;
esac
[[ " $* " == *' --config='* && $MOUNT ]] ||
  { echo "gke.sh: after -- come the arguments of pretrainax.main, among them --config= and --workdir=gs://... or /shared/..." >&2 && exit 2; }

missing=''
for name in $needed; do
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
for name in NAME IMAGE ACCELERATOR TOPOLOGY HOSTS CHIPS_PER_HOST MOUNT CACHE VOLUME SLICES RESTARTS ARGUMENTS; do
  text=${text//"\${$name}"/"${!name}"}
done
if [[ $dry ]]; then echo "$text"; else kubectl apply -f - <<<"$text"; fi
