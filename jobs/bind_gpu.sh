#!/bin/sh
# Give each rank one GPU before MPI starts, for MPI libraries that must see only one:
#
#     srun bind_gpu.sh python script.py        mpirun bind_gpu.sh python script.py
#
# Sets CUDA_VISIBLE_DEVICES to one entry of its current list, or to one GPU of the node, by the local
# rank. Does nothing if the rank has one GPU, or if srun has assigned GPUs to it.

if [ $# -eq 0 ]; then
    echo "usage: LAUNCHER bind_gpu.sh COMMAND [ARGUMENT...]" >&2
    exit 2
fi

if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    gpus=$CUDA_VISIBLE_DEVICES
else
    gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null) || gpus=
fi
gpus=$(printf %s "$gpus" | tr -s ', \n' ' ')
count=0
for gpu in $gpus; do count=$((count + 1)); done
[ "$count" -gt 1 ] || exec "$@"

local_rank=
for name in LOCAL_RANK OMPI_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID PMI_LOCAL_RANK \
    MV2_COMM_WORLD_LOCAL_RANK FLUX_TASK_LOCAL_ID PALS_LOCAL_RANKID SLURM_LOCALID; do
    eval "value=\${$name-}"
    case $value in
        '' | *[!0-9]*) ;;
        *) local_rank=$value && break ;;
    esac
done
if [ -n "$local_rank" ] && [ "$name" = SLURM_LOCALID ] && [ -n "${SLURM_GPUS_PER_TASK-}" ]; then
    exec "$@"
fi
if [ -z "$local_rank" ]; then
    echo "bind_gpu.sh: the local rank is unknown; set LOCAL_RANK" >&2
    exit 1
fi

skip=$((local_rank % count))
for gpu in $gpus; do
    [ "$skip" -gt 0 ] || break
    skip=$((skip - 1))
done
export CUDA_VISIBLE_DEVICES="$gpu"
exec "$@"
