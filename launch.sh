#!/usr/bin/env bash
# Sets up what is missing, then trains with torchrun: one process per GPU, without GPUs two processes on the CPU.
#
#   ./launch.sh [--config FILE] [section.key=value ...]    train
#   ./launch.sh test [pytest options]                      run the tests
#
# NPROC=n sets the number of processes. An active Python that imports the packages is used as it is; otherwise .venv is
# made beside this script from requirements.txt (for the tests, requirements-dev.txt).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
requirements=$here/requirements.txt
modules="torch, torch_geometric, yaml, tqdm"
if [ "${1:-}" = test ]; then
  requirements=$here/requirements-dev.txt
  modules="$modules, pytest, ruff"
fi

die() {
  echo "error: $1" >&2
  exit 1
}

# Prints the number of GPUs that Python $1 sees, and fails if a package is missing there.
count_gpus() {
  "$1" -c "import $modules; print(torch.cuda.device_count())" 2>/dev/null
}

make_environment() {
  local base
  base=$(command -v python3 || command -v python) || die "Python is not installed: install Python 3.10 or newer"
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$base is older than Python 3.10: activate a newer one"
  echo "Installing $(basename "$requirements") into $here/.venv (once; PyTorch is large)"
  [ -x "$here/.venv/bin/python" ] || "$base" -m venv "$here/.venv" || die "cannot make $here/.venv"
  "$here/.venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements" \
    || die "pip could not install $requirements: see its message above, then run this again"
}

python=$(command -v python || command -v python3 || true)
if [ -z "$python" ] || ! gpus=$(count_gpus "$python"); then
  python=$here/.venv/bin/python
  exec 9<"$requirements" # a second launch.sh waits here while the first one installs
  if command -v flock >/dev/null; then flock 9; fi
  if ! gpus=$(count_gpus "$python"); then
    make_environment
    gpus=$(count_gpus "$python") || die "$python still cannot import $modules: remove $here/.venv and run this again"
  fi
  exec 9<&-
fi

if [ "${1:-}" = test ]; then
  cd "$here"
  exec "$python" -m pytest "${@:2}"
fi

nproc=${NPROC:-$((gpus > 0 ? gpus : 2))}
[[ $nproc =~ ^[1-9][0-9]*$ ]] || die "NPROC must be a number of processes, not '$nproc'"
cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > nproc ? cores / nproc : 1))}
exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$nproc" "$here/train.py" "$@"
