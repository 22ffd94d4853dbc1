#!/usr/bin/env bash
# Fills in launch/gke.yaml from environment variables and applies it with kubectl; --dry-run prints it instead.
#
#   NAME=t5 IMAGE=REGISTRY/pretrainax ACCELERATOR=tpu-v5-lite-podslice TOPOLOGY=4x4 HOSTS=4 CHIPS_PER_HOST=4 \
#     launch/gke.sh [--dry-run] -- --config=configs/t5_base.py --workdir=gs://mine/t5 --config.data.cache_dir=gs://mine/cache
#
# Required:
#   NAME            name of the JobSet
#   IMAGE           image with this folder as its working directory, and installed with the extras tpu, gcs, and
#                   tfds or metrics if the config needs them
#   ACCELERATOR     label of the node pool: tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice, ...
#   TOPOLOGY        chips per slice, such as 4x4 or 4x4x8
#   HOSTS           hosts per slice
#   CHIPS_PER_HOST  chips per host
#   CLAIM           only with --workdir=/shared/...: a PersistentVolumeClaim that all pods can write (ReadWriteMany)
# Optional: SLICES (1), RESTARTS (10).
#
# The cluster needs the JobSet controller (jobset.sigs.k8s.io). With a bucket, pods need write access (Workload
# Identity), and each node stores its part of the bucket on its disk across restarts.
set -euo pipefail

dry=''
[[ ${1-} == --dry-run ]] && dry=yes && shift
[[ ${1-} == -- ]] && shift
needed='NAME IMAGE ACCELERATOR TOPOLOGY HOSTS CHIPS_PER_HOST'
workdir=''
for argument in "$@"; do
  [[ $argument != --workdir=* ]] || workdir=${argument#*=}
done
case $workdir in
  /shared/*) needed+=' CLAIM' MOUNT=/shared CACHE= VOLUME="persistentVolumeClaim: {claimName: ${CLAIM-}}" ;;
  *://*) MOUNT=/cache CACHE=/cache VOLUME='hostPath: {path: /mnt/stateful_partition/pretrainax, type: DirectoryOrCreate}' ;;
  *) MOUNT='' ;;
esac
[[ " $* " == *' --config='* && $MOUNT ]] ||
  { echo "gke.sh: give the arguments of pretrainax.main after --, with --config= and --workdir=gs://... or /shared/..." >&2 && exit 2; }

missing=''
for name in $needed; do
  [[ ${!name-} ]] || missing+=" $name"
done
[[ ! $missing ]] || { echo "gke.sh: not set:$missing; the top of launch/gke.sh describes them" >&2 && exit 2; }
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
