#!/usr/bin/env bash
# Installs what is missing, then trains with torchrun: one process per GPU or, without GPUs, two on the CPU.
# An active Python that has the packages is used; otherwise they are installed into .venv beside this script.
#
#   ./launch.sh [--config FILE] [section.key=value ...]       one machine
#   NNODES=2 RDZV=host:port ./launch.sh ...                   several: the same command on each
#   sbatch --nodes=2 --gpus-per-node=4 launch.sh ...          SLURM; or ./launch.sh in an salloc, or srun ./launch.sh
#   sbatch --array=0-3 launch.sh run.name=s%a run.seed=%a     a sweep: %a is the array task's index
#   ./launch.sh test [--all] [pytest options]                 run the quick tests or all of them, files side by side
#
# NPROC         processes on this machine; may differ between machines
# NNODES        number of machines, or a range such as 1:4 for an elastic run
# RDZV          where the machines meet: host:port, an address of one of them and a free port there
# RDZV_TIMEOUT  seconds to wait for the other machines (600)
# MAX_RESTARTS  how often torchrun restarts failed processes (0)
#
#SBATCH --job-name=knockout
#SBATCH --ntasks-per-node=1   # one launch.sh per node, which starts the node's processes
#SBATCH --exclusive           # all CPUs of the node; for a share of it: --oversubscribe --cpus-per-task=n
#SBATCH --time=12:00:00       # a longer run is requeued and resumes
#SBATCH --signal=B:USR1@300   # sent 300 s before the limit; stopping takes a second, a step (or evaluation batch) and a checkpoint
#SBATCH --requeue             # after the time limit, a preemption or a node failure
#SBATCH --open-mode=append    # the resumed job appends to its log; nodes log to slurm-<job>.node<n>.out
set -euo pipefail

die() { echo "error: $1" >&2; exit 1; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) job=''
if [[ ${BASH_SOURCE[0]} == */slurm_script ]]; then # sbatch runs a copy of this file elsewhere
  job=$SLURM_JOB_ID stop_requested=''
  if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    set -- "${@//%a/$SLURM_ARRAY_TASK_ID}"
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # SLURM_JOB_ID may denote the whole array
  fi
  export STOP_FILE=$PWD/slurm-$job.stop # once it exists, all ranks stop at the same step, save and exit
  rm -f "$STOP_FILE"
  trap 'stop_requested=yes; touch "$STOP_FILE"' USR1
  trap : TERM # SLURM signals the processes, too; this shell waits for them
  here=$(scontrol show job "$job" | sed -n 's|^ *Command=\(.*\)/launch\.sh.*|\1|p')
  [ -f "$here/train.py" ] || die "sbatch must be given launch.sh under its own name, beside train.py"
fi

requirements=$here/requirements.txt modules="torch torch_geometric yaml tqdm"
if [ "${1:-}" = test ]; then requirements=$here/requirements-dev.txt modules+=" pytest ruff xdist"; fi
probe="import torch, importlib.util as u; assert all(map(u.find_spec, '$modules'.split())); print(torch.cuda.device_count())"
has_packages() { gpus=$("$1" -c "$probe" 2>/dev/null); }
if has_packages python; then python=python
elif has_packages python3; then python=python3
else
  python=$here/.venv/bin/python
  exec 9<"$requirements" # only one launch.sh installs at a time
  if command -v flock >/dev/null; then flock 9; fi
  if ! has_packages "$python"; then
    base=$(command -v python3 || command -v python) || die "Python is not installed: install Python 3.10 or newer"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$base is older than Python 3.10: activate a newer one"
    echo "Installing ${requirements##*/} into $here/.venv (once; PyTorch is large)"
    [ -x "$python" ] || "$base" -m venv "$here/.venv" || die "cannot make $here/.venv"
    "$python" -m pip install --quiet --disable-pip-version-check -r "$requirements" || die "pip could not install $requirements"
    has_packages "$python" || die "$python still lacks one of ${modules// /, }: remove $here/.venv and run this again"
  fi
  exec 9<&-
fi
if [ "${1:-}" = test ]; then
  cd "$here" && exec "$python" -m pytest -c pyproject.toml -p tests.options -n auto --dist loadfile --no-loadscope-reorder "${@:2}"
fi

if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${NNODES:-}" ]; then
  # Step ids from 4294967290 up are the batch script or a shell in salloc: start one launch.sh per node from there.
  if [ "${SLURM_STEP_ID:-4294967290}" -ge 4294967290 ]; then
    srun=(srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0
      --wait=120 ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"})
    [ -n "$job" ] || exec "${srun[@]}" "$here/launch.sh" "$@"
    "${srun[@]}" --output="slurm-$job.node%n.out" --open-mode=append "$here/launch.sh" "$@" &
    while kill -0 $! 2>/dev/null; do wait $! || true; done # a signal interrupts wait
    wait $! && status=0 || status=$?
    rm -f "$STOP_FILE"
    state=$(scontrol --oneliner show job "$job" || true) # not RUNNING after scancel: do not requeue
    # SLURM does not requeue a preempted job that exits within its GraceTime.
    if [[ $state == *JobState=RUNNING* && ($stop_requested$status == yes0 || $state == *\ PreemptTime=[0-9]*) ]]; then
      ((${SLURM_RESTART_COUNT:-0} < 100)) || die "requeued 100 times: check its progress, and raise --time"
      echo "stopped, requeued: the same job will resume the run"
      exec scontrol requeue "$job" # kills this script
    fi
    [ "$status" = 0 ] || echo "error: the training ended with status $status: see slurm-$job.node*.out" >&2
    exit "$status"
  fi
  [ "$SLURM_STEP_NUM_TASKS" = "$SLURM_STEP_NUM_NODES" ] || die "srun must start one launch.sh per node: --ntasks-per-node=1"
  NNODES=$SLURM_STEP_NUM_NODES
  read -r head < <(scontrol show hostnames "$SLURM_STEP_NODELIST")
  RDZV=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'):$((20000 + SLURM_JOB_ID % 10000))
fi

processes=${NPROC:-$((gpus > 0 ? gpus : 2))}
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240} # seconds to reach a step and save
torchrun=("$python" -m torch.distributed.run --nproc-per-node="$processes" --max-restarts="${MAX_RESTARTS:=0}"
  "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
if [ "${NNODES:=1}" = 1 ]; then exec "${torchrun[@]}" --standalone "$here/train.py" "$@"; fi

# By default torchrun and gloo resolve this machine's host name, which often gives 127.0.1.1 or another network, to find
# out whether RDZV is this machine, the address for the other machines, and the network interface: determine them here.
[[ ${RDZV:=} =~ ^[^:]+:[0-9]+$ ]] || die "NNODES=$NNODES needs RDZV=host:port, an address of one of the machines, not '$RDZV'"
host=${RDZV%:*} port=${RDZV#*:} timeout_s=${RDZV_TIMEOUT:-600}
read -r address _ < <(getent ahostsv4 "$host") || die "cannot resolve the host $host (RDZV)"
route=$(ip -4 route get "$address") || die "there is no route to $host (RDZV)"
settings=join_timeout=$timeout_s,last_call_timeout=$((timeout_s / 20 + 1))
if [[ $route != local* ]]; then
  settings+=,is_host=0 SECONDS=0
  until timeout 5 bash -c ": <>/dev/tcp/$address/$port" 2>/dev/null; do
    ((SECONDS < timeout_s)) || die "nothing answered at $RDZV (RDZV) for $timeout_s s (RDZV_TIMEOUT): run the command on each machine"
    sleep 0.5
  done
elif [[ $host != localhost && $host != 127.* ]]; then # for these, torchruns on one machine elect the host themselves
  settings+=,is_host=1
  if [[ $address == 127.* ]]; then route=$(ip -4 route get 192.0.2.1) || die "this machine has no network"; fi
fi
read -r own _ <<<"${route##* src }"
read -r _ interface _ < <(ip -4 -o address show to "$own")
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # warnings print pages of C++ stack
# With the store that torchrun shares by default, rendezvous rounds after the first do not work (torch 2.13).
if [[ $NNODES == *:* || $MAX_RESTARTS != 0 ]]; then export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; fi
exec "${torchrun[@]}" --nnodes="$NNODES" --local-addr="$own" --rdzv-backend=c10d --rdzv-endpoint="$address:$port" \
  --rdzv-id="${SLURM_JOB_ID:-launch}" --rdzv-conf="$settings" "$here/train.py" "$@"
