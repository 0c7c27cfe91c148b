#!/usr/bin/env bash
# Trains with torchrun: one process per GPU or, without GPUs, two processes on the CPU.
#
# The script uses the active Python if all packages are installed there. Otherwise, it uses the
# environment .venv next to the script, and creates it if necessary.
#
#   ./launch.sh [--config FILE] [section.key=value ...]    train on this machine
#   NNODES=2 RDZV=host:port ./launch.sh ...                train on two machines: run this on both
#   sbatch --nodes=2 --gpus-per-node=4 launch.sh ...       train in a SLURM job
#   [srun] ./launch.sh ...                                 train in the job of an salloc shell
#   sbatch --array=0-3 launch.sh run.name=s%a run.seed=%a  train a sweep: %a is the array task's id
#   ./launch.sh test [pytest options]                      run the quick tests in parallel
#   ./launch.sh test --all [pytest options]                run all tests in parallel
#   ./launch.sh copy DIR [--without PART,...]              create a folder for your own experiment
#
# docs/clusters.md explains these commands, and variables such as NPROC and MAX_RESTARTS.
#SBATCH --job-name=knockout --time=12:00:00 # a job that needs more time is requeued and resumes
#SBATCH --ntasks-per-node=1   # one launch.sh per node, with its own log slurm-<job>.node<n>.out
#SBATCH --exclusive           # use all CPUs; to use n of them: --oversubscribe --cpus-per-task=n
#SBATCH --signal=B:USR1@300   # 300 s before the limit, for the current step and a checkpoint
#SBATCH --requeue --open-mode=append # requeue after the limit, preemption or a failure; keep logs
if [ -z "${BASH_VERSION:-}" ]; then exec bash "$0" "$@"; fi # if it was started by `sh launch.sh`
set -euo pipefail +o posix

main() {
  if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    exec sed -n '2,/docs.clusters/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  fi
  find_here
  if [[ ${BASH_SOURCE[0]} == */slurm_script ]]; then # sbatch runs a copy of this file elsewhere
    set_up_batch_job
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then set -- "${@//%a/$SLURM_ARRAY_TASK_ID}"; fi
  fi
  modules="torch torch_geometric yaml tqdm"
  if [ "${1:-}" = test ]; then run_tests "${@:2}"; fi
  if [ "${1:-}" = copy ]; then make_copy "${@:2}"; fi
  choose_python requirements.txt
  if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${NNODES:-}" ]; then start_or_join_job_step "$@"; fi
  set_up_torchrun
  if [ "${NNODES:=${PET_NNODES:-1}}" = 1 ]; then set_up_one_machine; else set_up_rendezvous; fi
  exec "${torchrun[@]}" "$here/train.py" "$@"
}

die() { echo "error: $1" >&2; exit "${2:-1}"; }

find_here() { # sets `here` to the folder of this script, even if it is called through a link
  local file=${BASH_SOURCE[0]}
  if [ -L "$file" ]; then file=$(readlink -f "$file"); fi
  here=$(CDPATH='' cd "$(dirname "$file")" && pwd)
}

set_up_batch_job() {
  job=$SLURM_JOB_ID # in a job array, this may be the id of the complete array
  if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
  export STOP_FILE=$PWD/slurm-$job.stop # once it exists, all ranks stop at the same step and save
  rm -f "$STOP_FILE"
  stop_requested=no
  trap 'stop_requested=yes; touch "$STOP_FILE"' USR1 USR2 XCPU
  trap : TERM # SLURM also signals the training processes, and this shell waits for them
  here=$(scontrol show job "$job" | sed -n 's|^ *Command=\(.*\)/launch\.sh.*|\1|p')
  [ -f "$here/train.py" ] || die "train.py is not next to the script of this job: pass launch.sh\
 itself to sbatch, not a link or a copy"
}

choose_python() { # sets `python`; if no Python has the modules, installs the requirements $1
  for python in python python3; do
    if has_modules; then return; fi
  done
  python=$here/.venv/bin/python
  install "$1" 9<"$here/$1" # descriptor 9 is for the lock
}

has_modules() { # checks modules, and versions of torch and PyG; sets `gpus` to the number of GPUs
  gpus=$("$python" -c "import torch, sys, importlib.util as u
from importlib.metadata import version
if not all(map(u.find_spec, '$modules'.split())): sys.exit(1)
for package, least in (('torch', (2, 8)), ('torch_geometric', (2, 6))):
  if tuple(map(int, version(package).split('.')[:2])) < least: sys.exit(1)
print(torch.cuda.device_count())" 2>/dev/null)
}

install() {
  if command -v flock >/dev/null; then flock 9; fi # only one launch.sh installs at a time
  if has_modules; then return; fi
  local venv=$here/.venv base
  base=$(command -v python3 || command -v python) || die "Python is missing: install 3.10 or newer"
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$base is older than Python 3.10: activate a newer Python"
  echo "Installing $1 into $venv (only once; this takes minutes, because PyTorch is large)"
  [ -e "$venv" ] || rm -f "$venv" # remove a broken link
  [ -x "$python" ] || "$base" -m venv "$venv" || die "cannot create $venv: see the error above"
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null 2>&1 ||
    die "$venv has no pip: remove it, install python3-venv and repeat the command"
  "$python" -m pip install -q --disable-pip-version-check -r "$here/$1" ||
    die "cannot install $1: see the error above"
  has_modules || die "after the installation, $python still lacks one of ${modules// /, }:\
 remove $venv and repeat the command"
  echo "Installed: from now on, launch.sh uses $python"
}

run_tests() {
  [ -d "$here/tests" ] || die "$here/tests does not exist: copy it from the template"
  unset PYTHONSAFEPATH # otherwise, Python cannot import the tests from this folder
  modules+=" pytest ruff xdist"
  choose_python requirements-dev.txt
  cd "$here"
  exec "$python" -m pytest -c pyproject.toml -p tests.options -p xdist.plugin \
    -n auto --dist worksteal "$@"
}

make_copy() {
  local script=$here/tests/template/make_copy.py base
  [ -f "$script" ] || die "$script does not exist: run this command in the template, or copy this\
 folder with cp -r"
  base=$(command -v python3 || command -v python) || die "Python is missing: install 3.10 or newer"
  exec "$base" "$script" "$@"
}

start_or_join_job_step() { # step ids from 4294967290 mean the batch script or a shell in salloc
  if [ "${SLURM_STEP_ID:-4294967290}" -lt 4294967290 ]; then
    join_job_step
  elif has_slurm "${SLURM_NNODES:-1}"; then
    start_job_step "$@"
  fi
}

has_slurm() { # whether SLURM's commands exist; in a container without them, $1 nodes must be 1
  if command -v scontrol >/dev/null; then return; fi
  [ "$1" = 1 ] || die "the SLURM commands are not available, for example because this is a\
 container: set NNODES=$1 and RDZV=host:port on each node, or NNODES=1 to use only this node"
  false
}

join_job_step() {
  [ "$SLURM_STEP_NUM_TASKS" = "$SLURM_STEP_NUM_NODES" ] ||
    die "srun must start one launch.sh per node: use --ntasks-per-node=1"
  if ! has_slurm "$SLURM_STEP_NUM_NODES"; then return; fi
  NNODES=$SLURM_STEP_NUM_NODES
  read -r first_node < <(scontrol show hostnames "$SLURM_STEP_NODELIST") ||
    die "scontrol cannot list the nodes of this step: $SLURM_STEP_NODELIST"
  RDZV=$(scontrol show node "$first_node" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
  RDZV+=:$((20000 + SLURM_JOB_ID % 10000))
}

start_job_step() { # starts one launch.sh per node; a batch script then ends or requeues the job
  local srun=(srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1
    --cpu-bind=none --kill-on-bad-exit=0 --wait=120
    ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"})
  if [[ ${BASH_SOURCE[0]} != */slurm_script ]]; then exec "${srun[@]}" "$here/launch.sh" "$@"; fi
  "${srun[@]}" --output="slurm-$job.node%n.out" --open-mode=append "$here/launch.sh" "$@" &
  while kill -0 $! 2>/dev/null; do wait $! || true; done # a signal makes wait return early
  local state status=0
  wait $! || status=$?
  rm -f "$STOP_FILE"
  state=$(scontrol --oneliner show job "$job" || true) # after scancel, it is not RUNNING
  # SLURM does not requeue a preempted job that exits within its GraceTime.
  if [[ $state == *JobState=RUNNING* &&
    ($state == *\ PreemptTime=[0-9]* || ($stop_requested == yes && $status == 0)) ]]; then
    [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ] ||
      die "the job was requeued 100 times: check its progress, and increase --time"
    echo "stopped and requeued: the same job will resume the run"
    exec scontrol requeue "$job" # kills this script
  fi
  if [ "$status" = 0 ]; then exit; fi
  die "the training ended with status $status: see slurm-$job.node*.out" "$status"
}

set_up_torchrun() {
  local threads processes=${NPROC:-$((gpus > 0 ? gpus : 2))} signals
  signals=SIGTERM,SIGINT,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU
  if [ -z "$(trap -p HUP)" ]; then signals+=,SIGHUP; fi # under nohup, it remains ignored
  [[ $processes =~ ^[1-9][0-9]*$ ]] ||
    die "NPROC=$processes is not a number of processes: unset it to use one process per GPU, or 2\
 on the CPU"
  if [ -f "$here/ddp_threads.py" ]; then # otherwise, torch and torchrun choose the number
    threads=$("$python" "$here/ddp_threads.py" "$processes")
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
  fi
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240} # in seconds
  # The limit above is the time for the last step and a checkpoint. The wrapper below replaces the
  # traceback that torchrun prints after Ctrl-C and other signals, which would look like a crash.
  torchrun=("$python" -c 'import sys
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.run import main
try:
    main()
except SignalException as stop:
    sys.exit(f"torchrun  ended by {stop.sigval.name}")' --nproc-per-node="$processes"
    --max-restarts="${MAX_RESTARTS:=0}" --signals-to-handle="$signals")
}

set_up_one_machine() { # works even if the name of the machine cannot be resolved
  torchrun+=(--nnodes=1 --local-addr=127.0.0.1 --standalone)
}

set_up_rendezvous() {
  [ -f "$here/ddp_machines.py" ] || die "NNODES=$NNODES needs $here/ddp_machines.py, which this\
 copy does not have: set NNODES=1, or start torchrun on each machine"
  meeting=$("$python" "$here/ddp_machines.py" "$NNODES" "${RDZV:-}" "${RDZV_TIMEOUT:-600}")
  read -r interface own_address endpoint settings <<<"$meeting"
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
  export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # its warnings have long C++ traces
  # In torch 2.13, rendezvous rounds after the first fail with the store that torchrun shares by
  # default.
  if [[ $NNODES = *:* || $MAX_RESTARTS != 0 ]]; then export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; fi
  torchrun+=(--nnodes="$NNODES" --local-addr="$own_address" --rdzv-backend=c10d
    --rdzv-endpoint="$endpoint" --rdzv-id="${SLURM_JOB_ID:-launch}" --rdzv-conf="$settings")
}

main "$@"
