#!/bin/sh
#SBATCH --job-name=rlpipe
#SBATCH --nodes=6
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
# Ray on the nodes of a Slurm job, then rlpipe on the first one.
#
#   RLPIPE_IMAGE=... RLPIPE_SHARED=/shared sbatch docker/cluster/slurm.sh +recipe=swe_rl model.path=/shared/model
#
# RLPIPE_IMAGE: what pyxis takes, made from docker/Dockerfile.gpu. RLPIPE_SHARED: a file system all nodes see.
# RLPIPE_PORT: of Ray's head (6379). RLPIPE_WORKER_PORTS: range of its processes (20000-29999), open between nodes.
# RLPIPE_INTERFACE: network of the nodes (default: of their first address). RAY_AUTH_TOKEN: default a random one.
# Its commands are checked by CI with a made-up srun; it was not run on a cluster by this project.
set -eu
: "${RLPIPE_IMAGE:?name the container image}" "${RLPIPE_SHARED:?name the shared file system}"
port=${RLPIPE_PORT:-6379}
ports=${RLPIPE_WORKER_PORTS:-20000-29999}

# Ray admits only who knows this token; srun passes the environment on.
RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
export RAY_AUTH_MODE RAY_AUTH_TOKEN
if [ -n "${RLPIPE_INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME="$RLPIPE_INTERFACE" NCCL_SOCKET_IFNAME="$RLPIPE_INTERFACE"
fi

# Not `hostname --ip-address`: that is 127.0.1.1 on Debian, where no other node reaches it.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if [ -n "${RLPIPE_INTERFACE:-}" ]; then
    address=$(srun --nodes=1 --ntasks=1 --overlap -w "$head" ip -4 -o addr show "$RLPIPE_INTERFACE" |
        tr -s ' ' | cut -d' ' -f4 | cut -d/ -f1 | head -n 1)
else
    address=$(srun --nodes=1 --ntasks=1 --overlap -w "$head" hostname -I | cut -d' ' -f1)
fi
: "${address:?no address of $head: set RLPIPE_INTERFACE}"

# --cpus-per-task is not inherited from sbatch since Slurm 22.05.
contained="--container-image=$RLPIPE_IMAGE --container-mounts=$RLPIPE_SHARED:$RLPIPE_SHARED"
share="--overlap --cpus-per-task=${SLURM_CPUS_PER_TASK:-96} --gpus-per-node=${SLURM_GPUS_PER_NODE:-8}"
fixed="--min-worker-port=${ports%-*} --max-worker-port=${ports#*-} --disable-usage-stats --block"

# shellcheck disable=SC2086  # several words on purpose
srun --nodes=1 --ntasks=1 $share -w "$head" $contained --container-name=rlpipe \
    ray start --head --node-ip-address="$address" --port="$port" --include-dashboard=false $fixed &
sleep "${RLPIPE_START_S:-20}"
workers=$((SLURM_JOB_NUM_NODES - 1))
if [ "$workers" -gt 0 ]; then
    # shellcheck disable=SC2086
    srun --nodes=$workers --ntasks=$workers $share --exclude="$head" $contained \
        ray start --address="$address:$port" $fixed &
    sleep "${RLPIPE_START_S:-20}"
fi
# shellcheck disable=SC2086
srun --nodes=1 --ntasks=1 $share -w "$head" $contained --container-name=rlpipe \
    python -m rlpipe.run cluster=many_nodes rollout=sglang "cluster.address=$address:$port" \
    "run.dir=$RLPIPE_SHARED/runs/$SLURM_JOB_ID" "$@"
