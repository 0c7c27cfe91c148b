#!/usr/bin/env bash
# Sets up what is missing, then trains with torchrun: one process per GPU, without GPUs two processes on the CPU.
#
#   ./launch.sh [--config FILE] [section.key=value ...]       one machine
#   NNODES=2 RDZV=host:port ./launch.sh ...                   several: the same command on each
#   sbatch --nodes=2 --gpus-per-node=4 launch.sh ...          SLURM; or ./launch.sh in an salloc, or srun ./launch.sh
#   sbatch --array=0-3 launch.sh run.name=s%a run.seed=%a     a sweep: %a is the number of the array's task
#   ./launch.sh test [pytest options]                         run the tests, three files at a time (-n0: one by one)
#
# An active Python that has the packages is used as it is; otherwise .venv is made beside this script from
# requirements.txt (for the tests, requirements-dev.txt).
#
# NPROC         processes of this machine, which may differ between machines
# NNODES        number of machines, or a range such as 1:4 of how many may come and go
# RDZV          where they meet: an address of one of them and a free port there
# RDZV_TIMEOUT  seconds to wait for the others (600)
# MAX_RESTARTS  how often torchrun starts failed processes again (0)
#
#SBATCH --job-name=knockout
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1   # one launch.sh a node, which starts the node's processes
#SBATCH --exclusive           # with all CPUs of the node; for a part of it: --oversubscribe --cpus-per-task=n
#SBATCH --time=12:00:00       # a longer run is requeued and goes on
#SBATCH --signal=B:USR1@300   # so many seconds before; stopping takes a step, or a batch of evaluation, and a checkpoint
#SBATCH --requeue             # after the time limit, a preemption or the loss of a node
#SBATCH --open-mode=append    # and goes on in the same log
set -euo pipefail

die() { # message, status
  echo "error: $1" >&2
  exit "${2:-1}"
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
batch=
if [[ ${BASH_SOURCE[0]} == */slurm_script ]]; then # sbatch runs a copy in a folder of its own
  batch=yes asked=
  trap 'asked=yes' USR1 # its time may be over before it trains
  here=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')
  here=${here%%/launch.sh*}
  [ -f "$here/train.py" ] || die "sbatch must be given launch.sh under its own name, beside train.py"
fi
requirements=$here/requirements.txt
modules="torch torch_geometric yaml tqdm"
if [ "${1:-}" = test ]; then
  requirements=$here/requirements-dev.txt
  modules="$modules pytest ruff xdist"
fi

# Prints the number of GPUs that Python $1 sees, and fails if a package is missing there.
count_gpus() {
  "$1" -c "import torch, importlib.util as util
for name in '$modules'.split():
    util.find_spec(name).name
print(torch.cuda.device_count())" 2>/dev/null
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
    gpus=$(count_gpus "$python") || die "$python still lacks one of ${modules// /, }: remove $here/.venv and run this again"
  fi
  exec 9<&-
fi

if [ "${1:-}" = test ]; then
  cd "$here"
  exec "$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "${@:2}" # many tests just wait
fi

# One launch.sh on each node of a SLURM job, in place of this shell.
on_all_nodes() {
  exec srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 \
    --wait=120 ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} "$@"
}

# The batch script of a SLURM job: trains, and when its time is over stops the run at a step and requeues the job.
run_batch() {
  local job=$SLURM_JOB_ID folder first_step status ended='' again=''
  if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    [[ " $*" =~ \ (run\.name=|run\.dir=|--config[=\ ])[^\ ]*%a ]] \
      || die "each task of an array needs its own run folder: give run.name=<name>%a"
    set -- "${@//%a/$SLURM_ARRAY_TASK_ID}"
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # the number alone may stand for the whole array
  fi
  folder=$(PYTHONPATH=$here "$python" -c "$print_run_folder" "$@")
  echo "run folder $folder, logs of the nodes in slurm-$job.node*.out"
  [ "${SLURM_RESTART_COUNT:-0}" = 0 ] || rm -f "$folder/STOP" # perhaps the last start was killed before it saw that
  first_step=$(status_of "$folder" step)
  trap 'asked=yes; mkdir -p "$folder"; touch "$folder/STOP"' USR1
  if [ -n "$asked" ]; then kill -USR1 $$; fi
  trap 'ended=yes' TERM # SLURM sends it to the processes too, and they stop by themselves
  on_all_nodes --output="slurm-$job.node%n.out" --open-mode=append "$here/launch.sh" "$@" &
  while kill -0 $! 2>/dev/null; do wait $! || true; done # a signal ends a wait, too
  status=0
  wait $! || status=$?
  # Not after scancel, which also sends TERM: a job that was cancelled would come back.
  if [ -n "$asked" ] && [ -z "$ended" ] || is_preempted "$job"; then again=yes; fi
  if [ -n "$again" ] && [ "$(status_of "$folder" state)" = '"stopped"' ]; then
    if [ -n "$asked" ] && [ "$(status_of "$folder" step)" = "${first_step:-0}" ]; then
      die "stopped before its first step: raise --time, or lower the seconds of --signal"
    fi
    echo "stopped, requeued: the same job goes on from there"
    exec scontrol requeue "$job" # which kills this script
  fi
  rm -f "$folder/STOP"
  if [ "$status" != 0 ]; then die "the training ended with status $status: see slurm-$job.node*.out" "$status"; fi
  exit 0
}

status_of() { # run folder, key of its status.json
  sed -n "s/.*\"$2\": \([^,}]*\).*/\1/p" "$1/status.json" 2>/dev/null || true
}

# A partition's GraceTime is for the processes to stop by themselves, but then SLURM would count the job as ended.
is_preempted() { # job
  [[ $(scontrol --oneliner show job "$1") == *\ PreemptTime=[0-9]* ]]
}

print_run_folder='
import sys, train
try:
    config = train.load_config(train.parse_arguments(sys.argv[1:]))
except train.ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
print(f"{config.run.dir}/{config.run.name}")
'

if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${NNODES:-}" ]; then
  # Numbers from 4294967290 on are the steps of the batch script and of a shell inside salloc.
  if [ -n "$batch" ]; then
    run_batch "$@"
  elif [ "${SLURM_STEP_ID:-4294967290}" -ge 4294967290 ]; then
    on_all_nodes "$here/launch.sh" "$@"
  fi
  [ "$SLURM_STEP_NUM_TASKS" = "$SLURM_STEP_NUM_NODES" ] || die "srun must start one launch.sh a node: --ntasks-per-node=1"
  NNODES=$SLURM_STEP_NUM_NODES
  read -r head < <(scontrol show hostnames "$SLURM_STEP_NODELIST")
  RDZV=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'):$((20000 + SLURM_JOB_ID % 10000))
  export RDZV_IS_HOST=$((SLURM_NODEID == 0))
fi

nproc=${NPROC:-$((gpus > 0 ? gpus : 2))}
[[ $nproc =~ ^[1-9][0-9]*$ ]] || die "NPROC must be a number of processes, not '$nproc'"
[[ ${MAX_RESTARTS:=0} =~ ^[0-9]+$ ]] || die "MAX_RESTARTS must be a number, not '$MAX_RESTARTS'"
cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > nproc ? cores / nproc : 1))}
command=(--nproc_per_node="$nproc" --max_restarts="$MAX_RESTARTS" "$here/train.py" "$@")
if [ "${NNODES:=1}" = 1 ]; then
  exec "$python" -m torch.distributed.run --standalone "${command[@]}"
fi

[[ $NNODES =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || die "NNODES must be a number of machines or a range such as 1:4, not '$NNODES'"
(( ${NNODES%:*} <= ${NNODES#*:} )) || die "NNODES=$NNODES starts with the larger number: write the smallest number of machines first"
[[ ${RDZV:=} =~ ^[^:]+:[1-9][0-9]{0,4}$ && ${RDZV#*:} -le 65535 ]] || die "NNODES=$NNODES needs RDZV=host:port, an address of one of the machines, not '$RDZV'"
[[ ${RDZV_TIMEOUT:=600} =~ ^[1-9][0-9]*$ ]] || die "RDZV_TIMEOUT must be a number of seconds, not '$RDZV_TIMEOUT'"
export NNODES RDZV RDZV_TIMEOUT TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # or a cut shows pages of C++ frames
# torchrun's own store, which outlives the processes, tells machines of a second round nothing (torch 2.13).
if [ "$NNODES" != "${NNODES%:*}" ] || [ "$MAX_RESTARTS" != 0 ]; then export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; fi

# torchrun, told what it takes from the host name otherwise, which often stands for 127.0.1.1 or another network: whether
# RDZV is this machine, at which address the others find it, and over which interface gloo talks.
exec "$python" -c '
import fcntl, functools, logging, os, socket, struct, sys, threading, time
from contextlib import suppress
from datetime import timedelta
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError
from torch.distributed.launcher import api
from torch.distributed.run import main

endpoint, machines, patience = os.environ["RDZV"], os.environ["NNODES"], int(os.environ["RDZV_TIMEOUT"])
host, port = endpoint.split(":")
same = f"start the same command with NNODES={machines} and RDZV={endpoint} on each machine"

def own_address(target):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, int(port)))  # sends nothing
        return probe.getsockname()[0]

def leave():
    deadline = time.monotonic() + 5
    with suppress(DistError):
        store.add("gone", 1)
        while is_host and store.add("gone", 0) < store.add("came", 0) and time.monotonic() < deadline:
            time.sleep(0.1)

def notice_cuts():
    # The kernel gives up connections to a machine that is cut off after a quarter of an hour, and torch waits for that.
    options = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_USER_TIMEOUT: 1000 * min(60, patience)}
    while True:
        for path in os.scandir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(path).startswith("socket:"):
                    with socket.fromfd(int(path.name), socket.AF_INET, socket.SOCK_STREAM) as connection:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                        for option, value in options.items():
                            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        time.sleep(5)

try:
    own, address = own_address(host), socket.gethostbyname(host)
except OSError as error:
    sys.exit(f"error: this machine knows no way to {host} (RDZV): {error.strerror}")
is_host = int(os.environ.get("RDZV_IS_HOST", own == address or own.startswith("127.")))
if own.startswith("127.") and not host.startswith(("127.", "localhost")):
    with suppress(OSError):
        own = own_address("192.0.2.1")  # nobody, but the way there leads out of this machine
with socket.socket() as probe:
    for _, name in socket.if_nameindex():
        with suppress(OSError):
            if socket.inet_aton(own) == fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))[20:24]:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
deadline = time.monotonic() + patience
while not is_host:
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
        break
    except OSError:
        if time.monotonic() > deadline:
            sys.exit(f"error: nothing answered at {endpoint} (RDZV) for {patience} s (RDZV_TIMEOUT): {same}")
    time.sleep(0.5)
unusable = f"error: cannot use {endpoint} (RDZV), perhaps another program does"

def give_up():
    print(unusable, "(it does not answer)", file=sys.stderr, flush=True)
    os._exit(1)

try:
    silence = threading.Timer(min(60, patience), give_up)  # of a program that listens, for which torch waits for ever
    silence.start()
    # torchrun shares this server, which thus lives on until the others have left.
    store = TCPStore(host, int(port), None, bool(is_host), timedelta(seconds=min(60, patience)), False, multi_tenant=True)
    store.add("came", 1)
    theirs = store.compare_set("machines", "", machines).decode()
    if theirs != machines:
        sys.exit(f"error: NNODES={machines} here and NNODES={theirs} on another machine: {same}")
except (DistError, RuntimeError) as error:
    sys.exit(f"{unusable} ({str(error).splitlines()[0]})")
finally:
    silence.cancel()
# At the end torchrun waits 300 s for a machine that has left without a word, and then shows where it waited.
api.LocalElasticAgent = functools.partial(api.LocalElasticAgent, exit_barrier_timeout=30)
logging.getLogger("torch.distributed.elastic.agent.server.api").addFilter(lambda record: not record.exc_info)
waits = f"join_timeout={patience},last_call_timeout={max(1, min(30, patience // 8))},read_timeout={min(60, patience)}"
rendezvous = ["--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", f"--rdzv_conf=is_host={is_host},{waits}"]
sys.argv[1:1] = [*rendezvous, f"--nnodes={machines}", f"--local_addr={own}"]
threading.Thread(target=notice_cuts, daemon=True).start()
try:
    main()
except RendezvousTimeoutError:
    sys.exit(f"error: {machines} machines (NNODES) did not come to {endpoint} (RDZV) in {patience} s (RDZV_TIMEOUT): {same}")
except SignalException as error:
    sys.exit(128 + error.sigval)
except (RendezvousError, DistError) as error:
    reason = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
    sys.exit(f"error: lost the machines that met at {endpoint} (RDZV), {reason}: {same}, and the run goes on")
finally:
    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    leaving.join(10)  # it would take for ever on a machine that is cut off
' --rdzv_id="${SLURM_JOB_ID:-launch}" "${command[@]}"
