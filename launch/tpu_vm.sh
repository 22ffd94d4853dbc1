#!/usr/bin/env bash
# Runs the same command on every worker of a TPU VM, and restarts it from the newest checkpoint after a preemption or a
# failure. jax.distributed finds the other hosts.
#
#   launch/tpu_vm.sh --name=my-v5e-16 --zone=us-west4-a [--restarts=10] -- --config=configs/t5_base.py \
#     --workdir=gs://mine/t5 --config.data.cache_dir=gs://mine/cache
#   --dry-run prints the commands instead of running them.
#
# Required: --name, --zone and, after --, --config and --workdir. --workdir and config.data.cache_dir are in a bucket, or
# in a folder that all hosts of the slice share (Filestore). The VM's service account needs write access to the bucket.
# The script needs gcloud, logged in, and an existing TPU VM:
#   gcloud compute tpus tpu-vm create my-v5e-16 --zone=us-west4-a --accelerator-type=v5litepod-16 \
#     --version=v2-alpha-tpuv5-lite
set -euo pipefail

name='' zone='' dry='' restarts=10
while (($#)); do
  case $1 in
    --name=*) name=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --restarts=*) restarts=${1#*=} ;;
    --dry-run) dry=yes ;;
    --) shift && break ;;
    *) echo "tpu_vm.sh: unknown argument '$1'; allowed: --name= --zone= --restarts= --dry-run -- ARGUMENTS OF pretrainax.main" >&2 && exit 2 ;;
  esac
  shift
done
[[ $name && $zone && " $* " == *' --config='* && " $* " == *' --workdir='* ]] ||
  { echo "tpu_vm.sh: give --name=, --zone= and, after --, --config= and --workdir=" >&2 && exit 2; }
[[ $restarts =~ ^[0-9]+$ ]] || { echo "tpu_vm.sh: --restarts=$restarts is not a number" >&2 && exit 2; }

cd "$(dirname "$0")/.."
run() { if [[ $dry ]]; then printf '%q ' "$@" && echo; else "$@"; fi; }
extras=tpu,metrics,tfds
[[ " $* " == *gs://* ]] && extras+=,gcs
on_all_workers() { run gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"; }

folder=FOLDER # a new folder, which nobody else can write to
[[ $dry ]] || { folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT; }
GLOBIGNORE=.git:.venv*:.*_cache:build:runs # leaves these out of *; an --exclude of tar would also match pretrainax/runs
run tar -czf "$folder/pretrainax.tgz" -- *
run gcloud compute tpus tpu-vm scp "$folder/pretrainax.tgz" "$name:" --zone="$zone" --worker=all
# The images of TPU VMs have Ubuntu 22.04 with Python 3.10, which is too old; uv provides a newer one.
on_all_workers "mkdir -p pretrainax && tar -xzf pretrainax.tgz -C pretrainax && cd pretrainax &&
  python3 -m pip install --quiet --user uv && export PATH=\$HOME/.local/bin:\$PATH &&
  uv python install --quiet 3.12 && make install PYTHON=\$(uv python find 3.12) EXTRAS=$extras"
# Each worker restarts its own process. If one fails, the others exit within 30 s, so all of them restart together.
# Exit status 2 is an invalid config; a restart would fail too.
on_all_workers "cd pretrainax && for attempt in \$(seq 0 $restarts); do
  .venv/bin/python -m pretrainax.main $(printf '%q ' "$@"); code=\$?
  case \$code in 0 | 2) break ;; esac
  ((attempt < $restarts)) || break
  echo \"exit status \$code; restart \$((attempt + 1)) of $restarts\"; sleep 30
done; exit \$code"
