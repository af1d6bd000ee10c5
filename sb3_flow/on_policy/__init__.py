"""The common parts of PPO, GRPO and their variants: collection, rollout buffers, estimators, update, native backend."""
