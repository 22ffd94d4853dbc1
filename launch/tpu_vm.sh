#!/usr/bin/env bash
# Runs the same command on every worker of a TPU VM. On a slice of several hosts --workdir must be on storage that all
# of them see (a bucket mounted with gcsfuse, Filestore); jax.distributed finds the other hosts by itself.
#
#   launch/tpu_vm.sh --name=my-v5e-16 --zone=us-west4-a -- --config=configs/t5_base.py --workdir=runs/t5
#   --dry-run prints the commands instead of running them.
#
# Needs gcloud, logged in, and a TPU VM that exists:
#   gcloud compute tpus tpu-vm create my-v5e-16 --zone=us-west4-a --accelerator-type=v5litepod-16 \
#     --version=v2-alpha-tpuv5-lite
set -euo pipefail

name='' zone='' dry=''
while (($#)); do
  case $1 in
    --name=*) name=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --dry-run) dry=yes ;;
    --) shift && break ;;
    *) echo "tpu_vm.sh: unknown argument '$1'; allowed: --name= --zone= --dry-run -- ARGUMENTS OF pretrainax.main" >&2 && exit 2 ;;
  esac
  shift
done
[[ $name && $zone && $# -gt 0 ]] || { echo "tpu_vm.sh: give --name=, --zone= and, after --, --config=" >&2 && exit 2; }

cd "$(dirname "$0")/.."
run() { if [[ $dry ]]; then printf '%q ' "$@" && echo; else "$@"; fi; }
on_all_workers() { run gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"; }

run tar --exclude=.venv --exclude=runs --exclude=.git -czf /tmp/pretrainax.tgz .
run gcloud compute tpus tpu-vm scp /tmp/pretrainax.tgz "$name:" --zone="$zone" --worker=all
on_all_workers "mkdir -p pretrainax && tar -xzf pretrainax.tgz -C pretrainax && cd pretrainax && make install EXTRAS=tpu"
on_all_workers "cd pretrainax && .venv/bin/python -m pretrainax.main $(printf '%q ' "$@")"
