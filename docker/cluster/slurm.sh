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
# Not run by this project.
set -eu
: "${RLPIPE_IMAGE:?name the container image}" "${RLPIPE_SHARED:?name the shared file system}"
port=6379
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --overlap -w "$head" hostname --ip-address | cut -d' ' -f1)
contained="--container-image=$RLPIPE_IMAGE --container-mounts=$RLPIPE_SHARED:$RLPIPE_SHARED"

# shellcheck disable=SC2086  # two words on purpose
srun --nodes=1 --ntasks=1 --overlap -w "$head" $contained --container-name=rlpipe \
    ray start --head --node-ip-address="$address" --port=$port --disable-usage-stats --block &
sleep 20
workers=$((SLURM_JOB_NUM_NODES - 1))
if [ "$workers" -gt 0 ]; then
    # shellcheck disable=SC2086
    srun --nodes=$workers --ntasks=$workers --overlap --exclude="$head" $contained \
        ray start --address="$address:$port" --disable-usage-stats --block &
    sleep 20
fi
# shellcheck disable=SC2086
srun --nodes=1 --ntasks=1 --overlap -w "$head" $contained --container-name=rlpipe \
    python -m rlpipe.run cluster=many_nodes rollout=sglang "cluster.address=$address:$port" \
    "run.dir=$RLPIPE_SHARED/runs/$SLURM_JOB_ID" "$@"
