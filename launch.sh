#!/usr/bin/env bash
# Sets up what is missing, then trains with torchrun: one process per GPU, without GPUs two processes on the CPU.
# An active Python that has the packages is used as it is; otherwise .venv is made beside this script.
#
#   ./launch.sh [--config FILE] [section.key=value ...]       one machine
#   NNODES=2 RDZV=host:port ./launch.sh ...                   several: the same command on each
#   sbatch --nodes=2 --gpus-per-node=4 launch.sh ...          SLURM; or ./launch.sh in an salloc, or srun ./launch.sh
#   sbatch --array=0-3 launch.sh run.name=s%a run.seed=%a     a sweep: %a is the number of the array's task
#   ./launch.sh test [pytest options]                         run the tests, three files at a time (-n0: one by one)
#
# NPROC         processes of this machine, which may differ between machines
# NNODES        number of machines, or a range such as 1:4 of how many may come and go
# RDZV          where they meet: an address of one of them and a free port there
# RDZV_TIMEOUT  seconds to wait for the others (600)
# MAX_RESTARTS  how often torchrun starts failed processes again (0)
#
#SBATCH --job-name=knockout
#SBATCH --ntasks-per-node=1   # one launch.sh a node, which starts the node's processes
#SBATCH --exclusive           # with all CPUs of the node; for a part of it: --oversubscribe --cpus-per-task=n
#SBATCH --time=12:00:00       # a longer run is requeued and goes on
#SBATCH --signal=B:USR1@300   # so many seconds before; stopping takes a step, or a batch of evaluation, and a checkpoint
#SBATCH --requeue             # after the time limit, a preemption or the loss of a node
#SBATCH --open-mode=append    # and goes on in the same log; those of the nodes are slurm-<job>.node<n>.out
set -euo pipefail

die() { echo "error: $1" >&2; exit 1; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) job=''
if [[ ${BASH_SOURCE[0]} == */slurm_script ]]; then # sbatch runs a copy in a folder of its own
  job=$SLURM_JOB_ID asked=''
  if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    set -- "${@//%a/$SLURM_ARRAY_TASK_ID}"
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # the number alone may stand for the whole array
  fi
  export STOP_FILE=$PWD/slurm-$job.stop # where it appears, the processes agree on a step, save and leave
  rm -f "$STOP_FILE"
  trap 'asked=yes; touch "$STOP_FILE"' USR1
  trap : TERM # SLURM sends it to the processes, too, and this shell waits for them
  here=$(scontrol show job "$job" | sed -n 's|^ *Command=\(.*\)/launch\.sh.*|\1|p')
  [ -f "$here/train.py" ] || die "sbatch must be given launch.sh under its own name, beside train.py"
fi

requirements=$here/requirements.txt modules="torch torch_geometric yaml tqdm"
if [ "${1:-}" = test ]; then requirements=$here/requirements-dev.txt modules+=" pytest ruff xdist"; fi
look="import torch, importlib.util as u; assert all(map(u.find_spec, '$modules'.split())); print(torch.cuda.device_count())"
has_packages() { gpus=$("$1" -c "$look" 2>/dev/null); }
if has_packages python; then python=python
elif has_packages python3; then python=python3
else
  python=$here/.venv/bin/python
  exec 9<"$requirements" # a second launch.sh waits here while the first one installs
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
  cd "$here" && exec "$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "${@:2}" # many tests just wait
fi

if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${NNODES:-}" ]; then
  # Steps from 4294967290 on are the batch script and a shell inside salloc: they start one launch.sh on each node.
  if [ "${SLURM_STEP_ID:-4294967290}" -ge 4294967290 ]; then
    srun=(srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0
      --wait=120 ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"})
    [ -n "$job" ] || exec "${srun[@]}" "$here/launch.sh" "$@"
    "${srun[@]}" --output="slurm-$job.node%n.out" --open-mode=append "$here/launch.sh" "$@" &
    while kill -0 $! 2>/dev/null; do wait $! || true; done # a signal ends a wait, too
    wait $! && status=0 || status=$?
    rm -f "$STOP_FILE"
    state=$(scontrol --oneliner show job "$job" || true) # not RUNNING after scancel: requeued, it would come back
    # A preempted job that leaves in its GraceTime would count as ended.
    if [[ $state == *JobState=RUNNING* && ($asked$status == yes0 || $state == *\ PreemptTime=[0-9]*) ]]; then
      ((${SLURM_RESTART_COUNT:-0} < 100)) || die "requeued 100 times: look whether it gets on, and raise --time"
      echo "stopped, requeued: the same job goes on from there"
      exec scontrol requeue "$job" # which kills this script
    fi
    [ "$status" = 0 ] || echo "error: the training ended with status $status: see slurm-$job.node*.out" >&2
    exit "$status"
  fi
  [ "$SLURM_STEP_NUM_TASKS" = "$SLURM_STEP_NUM_NODES" ] || die "srun must start one launch.sh a node: --ntasks-per-node=1"
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

# torchrun would ask the host name, which often stands for 127.0.1.1 or another network, whether RDZV is this machine,
# at which address the others find this one, and over which interface gloo talks.
[[ ${RDZV:=} =~ ^[^:]+:[0-9]+$ ]] || die "NNODES=$NNODES needs RDZV=host:port, an address of one of the machines, not '$RDZV'"
host=${RDZV%:*} port=${RDZV#*:} patience=${RDZV_TIMEOUT:-600}
read -r address _ < <(getent ahostsv4 "$host") || die "this machine does not know the host $host (RDZV)"
route=$(ip -4 route get "$address") || die "this machine knows no way to $host (RDZV)"
settings=join_timeout=$patience,last_call_timeout=$((patience / 20 + 1))
if [[ $route != local* ]]; then
  settings+=,is_host=0 SECONDS=0
  until timeout 5 bash -c ": <>/dev/tcp/$address/$port" 2>/dev/null; do
    ((SECONDS < patience)) || die "nothing answered at $RDZV (RDZV) for $patience s (RDZV_TIMEOUT): start it on each machine"
    sleep 0.5
  done
elif [[ $host != localhost && $host != 127.* ]]; then # there, several torchruns of one machine agree on the host
  settings+=,is_host=1
  if [[ $address == 127.* ]]; then route=$(ip -4 route get 192.0.2.1) || die "this machine has no network"; fi
fi
read -r own _ <<<"${route##* src }"
read -r _ interface _ < <(ip -4 -o address show to "$own")
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # its warnings are pages of C++ frames
# torchrun's own store, which outlives the processes, tells machines of a second round nothing (torch 2.13).
if [[ $NNODES == *:* || $MAX_RESTARTS != 0 ]]; then export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; fi
exec "${torchrun[@]}" --nnodes="$NNODES" --local-addr="$own" --rdzv-backend=c10d --rdzv-endpoint="$address:$port" \
  --rdzv-id="${SLURM_JOB_ID:-launch}" --rdzv-conf="$settings" "$here/train.py" "$@"
