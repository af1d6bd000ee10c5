"""What PPO, GRPO and their variants share: collection, rollout buffers, estimators, the update, the native backend."""
