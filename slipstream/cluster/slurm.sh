set -um
umask 077
stopping='' requeue=''
trap 'stopping=1 requeue=1' USR1
trap 'stopping=1' TERM

# Runs a role, and restarts it after errors that a restart may fix: NAME COMMAND...
restarted() {
    local name=$1 code delay stopped=''
    shift
    trap 'stopped=1' TERM
    for delay in 1 2 4 8 16 0; do
        "$@"
        code=$?
        # 2 is a permanent error.
        [[ -n $stopped || $code == 0 || $code == 2 || $delay == 0 ]] && break
        echo "$name ended with $code; restarting in $delay s" >&2
        sleep "$delay"
    done
    return "$code"
}

"$python" -m slipstream prepare "${settings[@]}" || exit

# Delete the old address: this job's broker may run on another node.
rm -f "$folder/address"
restarted broker "$python" -m slipstream.broker "${settings[@]}" &
broker=$!
deadline=$((SECONDS + 600))
until [[ -s $folder/address ]]; do
    if ! kill -0 "$broker" 2>/dev/null || ((SECONDS > deadline)) || [[ -n $stopping ]]; then
        echo "error: the broker must write $folder/address within 600 s, but did not" >&2
        kill -TERM -- "-$broker" 2>/dev/null
        wait "$broker"
        exit 1
    fi
    sleep 0.2
done
address=$(<"$folder/address")
meeting=${address#tcp://}
export MASTER_ADDR=${meeting%:*} MASTER_PORT=$((meet_from + SLURM_JOB_ID % meet_ports))
# In the environment, because every user of a node can read command lines.
export SLIPSTREAM_TOKEN=${SLIPSTREAM_TOKEN:-$(<"$folder/token")}

# The tasks expand these scripts.
# shellcheck disable=SC2016
restarted learner srun "${core[@]}" --label --kill-on-bad-exit=1 \
    bash -c 'NODE_RANK=$SLURM_PROCID exec "$@"' learner "$python" -m slipstream.learner "${settings[@]}" &
learner=$!
# shellcheck disable=SC2016
srun "${generators[@]}" --label --kill-on-bad-exit=0 --wait=0 \
    bash -c "$(declare -f restarted)"'
        export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
        restarted "generator-$SLURM_PROCID" "$@" --id "generator-$SLURM_PROCID"
    ' generators "$python" -m slipstream.generators "${own[@]}" "broker.address=$address" &
others=$!

while [[ -z $stopping ]] && kill -0 "$broker" 2>/dev/null && kill -0 "$learner" 2>/dev/null; do
    sleep 0.5
done
trap '' USR1 TERM
# The broker ends last, because the other roles say goodbye to it.
kill -TERM -- "-$others" "-$learner" 2>/dev/null
wait "$learner"
code=$?
wait "$others"
kill -TERM -- "-$broker" 2>/dev/null
wait "$broker"
if [[ -n $requeue ]]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit
fi
exit "$code"
