#!/usr/bin/env bash
# PPO with a reward function from a Python file.
#
#   examples/scripts/train_ppo_with_reward_fn.sh                    the built-in model, 5 steps on CPU cores
#   MODEL=org/model PROMPTS=prompts.jsonl REWARD=reward.py GPUS=8 examples/scripts/train_ppo_with_reward_fn.sh
#
# PROMPTS has the keys `input` and `label`; REWARD is the file, examples/reward_func.py unless set.
# Arguments go to `rlhf ppo` and win over the flags below. RLHF is the command, `rlhf` unless set.
set -euo pipefail
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

flags=(--advantage_estimator gae --init_kl_coef 0.01 --remote_rm_url "${REWARD:-$examples/reward_func.py}")
if [[ -n ${MODEL:-} ]]; then
  flags+=(--pretrain "$MODEL" --prompt_data "$PROMPTS" --label_key label --apply_chat_template
    --rollout_batch_size 512 --train_batch_size 128 --micro_train_batch_size 4 --micro_rollout_batch_size 8)
else
  flags+=(--train_steps 5)
fi
if [[ -n ${GPUS:-} ]]; then
  flags+=(--bf16 --packing_samples --gradient_checkpointing --zero_stage 3
    --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep
    --actor_num_gpus_per_node "$GPUS" --vllm_num_engines "$GPUS" --vllm_gpu_memory_utilization 0.5)
fi
exec ${RLHF:-rlhf} ppo "${flags[@]}" "$@"
