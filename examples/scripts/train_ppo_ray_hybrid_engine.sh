#!/usr/bin/env bash
# PPO with critic, reference and reward; models and engines share the GPUs and take turns.
#
#   examples/scripts/train_ppo_ray_hybrid_engine.sh                 the built-in model and its rule, 5 steps on CPU cores
#   MODEL=org/model REWARD_MODEL=org/reward PROMPTS=prompts.jsonl GPUS=8 examples/scripts/train_ppo_ray_hybrid_engine.sh
#
# Arguments go to `rlhf ppo` and win over the flags below. RLHF is the command, `rlhf` unless set.
set -euo pipefail

flags=(--advantage_estimator gae --init_kl_coef 0.01)
if [[ -n ${MODEL:-} ]]; then
  flags+=(--pretrain "$MODEL" --reward_pretrain "$REWARD_MODEL" --prompt_data "$PROMPTS" --apply_chat_template
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
