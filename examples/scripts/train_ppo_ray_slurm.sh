#!/usr/bin/env bash
# PPO over the nodes of a Slurm allocation: starts Ray on all of them, the run on the first one, and then ends Ray.
#
#   sbatch --nodes 2 --gpus-per-node 8 examples/scripts/train_ppo_ray_slurm.sh --pretrain org/model ...
#
# The arguments are those of `rlhf ppo`. Options of sbatch may also stand below. The environment with the packages, such as
# .venv, is active when sbatch is called, and lies on a disk of all nodes. RLHF is the command, `rlhf` unless set; PORT is
# Ray's, 6379 unless set; HEAD_IP is the first node's address, the first that it has unless set.
#SBATCH --job-name rlhf-ppo
#SBATCH --ntasks-per-node 1
#SBATCH --exclusive
set -euo pipefail

port=${PORT:-6379}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
on_head=(srun --overlap --nodes 1 --ntasks 1 --nodelist "$head")
ip=${HEAD_IP:-}
if [[ -z $ip ]]; then
  read -r ip _ < <("${on_head[@]}" hostname --all-ip-addresses)
fi

# Ray runs code for everybody who reaches it, unless it asks for a token. srun passes the environment on.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

gpus=()
if [[ -n ${SLURM_GPUS_ON_NODE:-} ]]; then
  gpus=(--num-gpus "$SLURM_GPUS_ON_NODE")
fi
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
"${on_head[@]}" ray start --head --node-ip-address "$ip" --port "$port" "${gpus[@]}" --block &
for node in "${nodes[@]:1}"; do
  srun --overlap --nodes 1 --ntasks 1 --nodelist "$node" ray start --address "$ip:$port" "${gpus[@]}" --block &
done

export RAY_ADDRESS=$ip:$port
count='import ray, sys; ray.init(log_to_driver=False); sys.exit(sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]))'
for attempt in {1..60}; do
  if "${on_head[@]}" python -c "$count" "${#nodes[@]}" 2>/dev/null; then
    break
  elif [[ $attempt == 60 ]]; then
    echo "error: Ray has not started on ${#nodes[@]} nodes; its messages are above" >&2
    exit 1
  fi
  sleep "${POLL_S:-5}"
done
"${on_head[@]}" ${RLHF:-rlhf} ppo "$@"
