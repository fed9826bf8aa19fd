#!/usr/bin/env bash
# Trains on Cloud TPU VMs: requests a queued resource, installs the checkout on all hosts, trains, and requests the resource
# again when it is taken away. Every command may be repeated safely.
#
#   bash launch/tpu_vm.sh COMMAND --name=NAME --zone=ZONE [flags] [-- arguments of het_plugin.train]
#
#   create    request the queued resource and wait until it is active
#   install   copy the checkout to all hosts and install it there
#   run       create, install, train on all hosts and wait; after a preemption start over (needs --model_dir)
#   status    show the state of the queued resource, and of training on its first host
#   collect   copy MODEL_DIR without its checkpoints, and the first host's log, to --into
#   delete    delete the queued resource and its TPU VMs
#
#   --name=NAME           name of the queued resource
#   --zone=ZONE           for example us-east5-a
#   --project=PROJECT     default: the project that gcloud is set to
#   --topology=v5e:4x4    TPU generation (v2, v3, v4, v5e, v5p, v6e) and shape of a slice in chips
#   --num_slices=1        number of slices
#   --spot                use Spot capacity
#   --model_dir=gs://...  folder of the run
#   --max_attempts=100    how often run may start training
#   --poll_seconds=60     seconds between two looks at the queued resource
#   --into=FOLDER         target of collect; default: runs/NAME
#   --dry_run             print the gcloud commands and run none
#
# Exit codes: 0 done; 1 training or gcloud failed; 2 a setting is wrong.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf '[tpu_vm] %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
wrong() { printf 'Error: %s\n' "$*" >&2; exit 2; }

SCRATCH="$(mktemp -d)"
trap 'rm -rf "$SCRATCH"' EXIT
REMOTE=het_plugin # the checkout, in the home folder of each host
GONE='no supervisor runs'
# Prints supervisor.json, and $GONE first if no supervisor has locked it, or $GONE alone if there is no such file. The file is
# only read: flock would make one.
LOOK="test -e $REMOTE/run/supervisor.json || { echo '$GONE'; exit; }; \
{ flock --nonblock 9 && echo '$GONE'; } 9<$REMOTE/run/supervisor.json; cat $REMOTE/run/supervisor.json"
NAME='' ZONE='' PROJECT='' TOPOLOGY='' MODEL_DIR='' INTO=''
NUM_SLICES=1 MAX_ATTEMPTS=100 POLL_SECONDS=60 SPOT=false DRY_RUN=false
TRAIN_ARGUMENTS=()

usage() { sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p;}' "${BASH_SOURCE[0]}"; }

# check FLAG VALUE PATTERN WHAT: the whole value must match the pattern. This matters most for numbers: Bash evaluates the
# text inside (( )), so a value such as x[$(command)] would run the command.
check() {
  local LC_ALL=C # [a-z] means ASCII letters only
  [[ "$2" =~ ^($3)$ ]] || wrong "--$1='$2' must be $4"
}

parse_arguments() {
  COMMAND="${1:-}"
  case "$COMMAND" in
    create | install | run | status | collect | delete) shift ;;
    -h | --help | help) usage; exit 0 ;;
    *) wrong "the first argument is '$COMMAND'; it must be create, install, run, status, collect or delete" ;;
  esac
  local flag
  while (($#)); do
    case "$1" in
      --name=* | --zone=* | --project=* | --topology=* | --num_slices=* | --model_dir=* | --max_attempts=* | --poll_seconds=* | --into=*)
        flag="${1%%=*}" flag="${flag#--}"
        printf -v "${flag^^}" '%s' "${1#*=}"
        ;;
      --spot) SPOT=true ;;
      --dry_run) DRY_RUN=true ;;
      --) shift; TRAIN_ARGUMENTS=("$@"); break ;;
      *) wrong "$1 is no flag of tpu_vm.sh; arguments of training come after --" ;;
    esac
    shift
  done
  check name "$NAME" '[a-z]([a-z0-9-]{0,60}[a-z0-9])?' 'lower-case letters, digits and hyphens, a letter first'
  check zone "$ZONE" '[a-z0-9-]+' 'a zone, such as us-east5-a'
  check project "$PROJECT" '([a-z][a-z0-9.:-]*)?' 'the id of a project'
  check num_slices "$NUM_SLICES" '[1-9][0-9]{0,3}' 'a whole number from 1 to 9999'
  check max_attempts "$MAX_ATTEMPTS" '[1-9][0-9]{0,5}' 'a whole number of at least 1'
  check poll_seconds "$POLL_SECONDS" '[0-9]{1,6}(\.[0-9]{1,6})?' 'a number of seconds'
  INTO="${INTO:-runs/$NAME}"
  if [[ "$COMMAND" == create || "$COMMAND" == run ]]; then parse_topology; fi
  if [[ "$COMMAND" == run || "$COMMAND" == collect ]]; then
    check model_dir "$MODEL_DIR" 'gs://[a-z0-9][A-Za-z0-9._/=+~@%,-]*' 'a gs:// folder, its bucket in lower case and without spaces: TPU VMs are deleted with their disks'
    check into "$INTO" '[^-].*' 'a folder whose name does not begin with a hyphen'
  fi
  if [[ "$COMMAND" == run && ${#TRAIN_ARGUMENTS[@]} == 0 ]]; then
    wrong 'no arguments of training: write -- --gin_file=... after the flags'
  fi
}

# Sets SLICE, the flags that ask for the slice, from the table in het_plugin/planning/slices.py.
parse_topology() {
  local flags
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null ||
    die 'python3 must be Python 3.10 or newer here: it reads the table of slices'
  flags="$(python3 -I "$ROOT/het_plugin/planning/slices.py" "$TOPOLOGY")" || exit 2
  read -ra SLICE <<< "$flags"
}

# Runs gcloud with zone and project; with --dry_run prints the command instead.
cloud() {
  local command=(gcloud "$@")
  if [[ "${1:-}" == compute ]]; then command+=("--zone=$ZONE"); fi
  if [[ -n "$PROJECT" ]]; then command+=("--project=$PROJECT"); fi
  if $DRY_RUN; then
    printf '%q ' "${command[@]}"
    echo
  else
    "${command[@]}" || return 1 # exit codes of gcloud and ssh are others than those above
  fi
}

queued() { local verb="$1"; shift; cloud compute tpus queued-resources "$verb" "$@"; }
on_all_hosts() { queued ssh "$NAME" --node=all --worker=all "--command=$1"; }
on_first_host() { queued ssh "$NAME" --node=0 --worker=0 "--command=$1"; }

# Prints the state of the queued resource: ACTIVE, SUSPENDED, ... or NONE if it does not exist.
resource_state() {
  local out
  if out="$(queued describe "$NAME" '--format=value(state.state)' 2>"$SCRATCH/errors")"; then
    echo "$out"
  elif grep -q NOT_FOUND "$SCRATCH/errors"; then
    echo NONE
  else
    die "gcloud cannot describe $NAME: $(cat "$SCRATCH/errors")"
  fi
}

create_request() {
  local request=("${SLICE[@]}")
  if ((NUM_SLICES > 1)); then
    request+=("--node-count=$NUM_SLICES" "--node-prefix=$NAME")
  else
    request+=("--node-id=$NAME")
  fi
  if $SPOT; then request+=(--spot); fi
  queued create "$NAME" "${request[@]}"
}

delete_resource() { queued delete "$NAME" --force --quiet; }

# Returns when the queued resource is active. Requests it if it does not exist or was taken away. Only the first look and the
# first request end the script if they fail: a request may wait for days, and gcloud fails now and then. Three requests in a
# row that end as FAILED end it too, since the next one would.
LAST_STATE='' REQUESTED=false
create() {
  if $DRY_RUN; then
    queued describe "$NAME" '--format=value(state.state)'
    create_request
    return
  fi
  local state failures=0
  while true; do
    if ! state="$(resource_state)"; then
      [[ -n "$LAST_STATE" ]] || exit 1
      sleep "$POLL_SECONDS"
      continue
    fi
    if [[ "$state" != "$LAST_STATE" ]]; then say "$NAME: $state"; fi
    LAST_STATE="$state"
    if [[ "$state" != NONE ]]; then REQUESTED=true; fi
    case "$state" in
      ACTIVE) return ;;
      NONE)
        if create_request; then REQUESTED=true; else $REQUESTED || exit 1; fi
        ;;
      SUSPENDED) delete_resource || say "$NAME: not deleted; trying again" ;;
      FAILED)
        say "$NAME: $(queued describe "$NAME" '--format=value(state)' || true)"
        ((++failures < 3)) || die "$NAME failed 3 times in a row"
        delete_resource || say "$NAME: not deleted; trying again"
        ;;
      *) ;; # not ready yet: WAITING_FOR_RESOURCES, PROVISIONING, SUSPENDING, DELETING, ...
    esac
    sleep "$POLL_SECONDS"
  done
}

# Packs the tracked files of the checkout.
pack() {
  (cd "$ROOT" && git ls-files -z | tar --null --create --gzip --files-from=- --file="$SCRATCH/het_plugin.tar.gz") ||
    die "the checkout $ROOT cannot be packed: it must be a git repository with all its files"
}

# Copies the packed checkout to each host and installs it. uv installs Python 3.11: the images have an older one.
install_packed() {
  queued scp "$SCRATCH/het_plugin.tar.gz" "$NAME:" --node=all --worker=all || return 1
  on_all_hosts "set -e; mkdir -p $REMOTE; tar -xzf het_plugin.tar.gz -C $REMOTE; cd $REMOTE; \
python3 -m pip install --quiet --user uv; \
test -x .venv/bin/python || python3 -m uv venv --quiet --python 3.11 .venv; \
python3 -m uv pip install --quiet --compile-bytecode --python .venv/bin/python -c requirements.txt '.[train,tpu]'"
}

install() {
  pack
  install_packed
}

# Starts training on all hosts, detached from the connection. Hosts that already train continue: launch.supervise refuses to
# start twice in one folder.
start() {
  local arguments=''
  if ((NUM_SLICES > 1)); then arguments="--gin.PjitPartitioner.num_replicas=$NUM_SLICES "; fi
  arguments+="$(printf '%q ' "${TRAIN_ARGUMENTS[@]}" "--gin.MODEL_DIR='$MODEL_DIR'")"
  on_all_hosts "cd $REMOTE; JAX_PLATFORMS=tpu,cpu setsid nohup .venv/bin/python -m launch.supervise --folder=run \
-- .venv/bin/python -m het_plugin.train $arguments > run.out 2>&1 < /dev/null & sleep 5; cat run.out" | tee "$SCRATCH/started" || return 1
  if grep -q 'is in use' "$SCRATCH/started"; then
    say "$NAME: training runs already, with the arguments that it was started with"
  fi
}

# Prints the first host's exit code of training, 'running', or 'unreachable'. If its supervisor was killed, or never started, the
# code is that of SIGKILL. A host that lost its peers ends with a signal's code; then that of the host which failed first counts.
training_state() {
  local out code
  if ! out="$(on_first_host "$LOOK" 2>/dev/null)"; then
    echo unreachable
    return
  elif [[ "$out" =~ \"exit_code\":\ ([0-9]+) ]]; then
    code="${BASH_REMATCH[1]}"
  elif [[ "$out" == *"$GONE"* ]]; then
    code=137
  else
    echo running
    return
  fi
  if ((code > 128)); then
    out="$(on_all_hosts "cat $REMOTE/run/supervisor.json" 2>/dev/null)" || true
    if [[ "$out" =~ \"exit_code\":\ ([123])[^0-9] ]]; then code="${BASH_REMATCH[1]}"; fi
  fi
  echo "$code"
}

# Waits for the end of training. Prints its exit code, or 'preempted' if the queued resource is no longer active.
follow() {
  local state
  while true; do
    sleep "$POLL_SECONDS"
    state="$(resource_state)" || continue # the reason was printed; training continues
    if [[ "$state" != ACTIVE ]]; then
      echo preempted
      return
    fi
    state="$(training_state)"
    case "$state" in
      running) ;;
      unreachable) say "$NAME: the first host does not answer" ;;
      *) echo "$state"; return ;;
    esac
  done
}

run() {
  local attempt outcome
  pack
  for ((attempt = 1; attempt <= MAX_ATTEMPTS; attempt++)); do
    create
    if ! install_packed || ! start; then
      # The host may have been taken away; create then requests the resource again.
      say "attempt $attempt: installing or starting failed"
      sleep "$POLL_SECONDS"
      continue
    fi
    if $DRY_RUN; then
      on_first_host "$LOOK"
      return
    fi
    say "attempt $attempt: training; Ctrl-C ends only the waiting"
    outcome="$(follow)"
    case "$outcome" in
      0) say 'done'; return ;;
      2) die "a setting is wrong: bash launch/tpu_vm.sh collect shows the log (run/supervisor.log on the host)" ;;
      preempted | 42) say "attempt $attempt: preempted; resuming from the newest checkpoint" ;;
      # Codes above 128 stand for signals: a process that lost its peers ends with 134.
      *)
        ((outcome > 128)) || die "training ended with exit code $outcome: see run/supervisor.log on the hosts"
        say "attempt $attempt: exit code $outcome; resuming from the newest checkpoint"
        ;;
    esac
  done
  die "preempted or failed $MAX_ATTEMPTS times, which is --max_attempts"
}

status() {
  if $DRY_RUN; then
    queued describe "$NAME" '--format=value(state.state)'
    on_first_host "$LOOK; tail -n 20 $REMOTE/run/supervisor.log"
    return
  fi
  local state
  state="$(resource_state)" || exit 1
  echo "$NAME: $state"
  if [[ "$state" == ACTIVE ]]; then
    on_first_host "$LOOK; echo; tail -n 20 $REMOTE/run/supervisor.log" || die "$NAME: the first host does not answer"
  fi
}

collect() {
  $DRY_RUN || mkdir -p "$INTO"
  cloud storage rsync --recursive '--exclude=(^|.*/)checkpoint_.*' "$MODEL_DIR" "$INTO"
  queued scp "$NAME:$REMOTE/run/supervisor.log" "$INTO/supervisor.log" --node=0 --worker=0 ||
    say 'the first host has no log'
}

delete() {
  if ! $DRY_RUN && [[ "$(resource_state)" == NONE ]]; then
    say "$NAME does not exist"
    return
  fi
  delete_resource
}

parse_arguments "$@"
$DRY_RUN || type gcloud > /dev/null 2>&1 || die 'there is no gcloud here: see https://cloud.google.com/sdk/docs/install'
"$COMMAND"
