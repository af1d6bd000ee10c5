"""Calls of what users call without an algorithm: buffers, datasets, kernels, losses."""

from typing import Any

import numpy as np
import torch as th

from sb3_flow import OfflineDataset, flow, kernels, losses
from sb3_flow.data import TrajectoryReplayBuffer
from tests.digests.running import Cases
from tests.tasks import PointEnv, collect


def replay_buffer() -> Any:
    found = []
    env, data = PointEnv(), collect(PointEnv(), episodes=6)
    for rule in ("rql", "q_chunking"):
        for sampling in ("trajectory", "transition"):
            for horizon, share in ((1, None), (3, None), (3, 0.5)):
                buffer = TrajectoryReplayBuffer(
                    *(40, env.observation_space, env.action_space, "cpu", 2),
                    **{"horizon_length": horizon, "offline_fraction": share, "sampling": sampling, "window_rule": rule},
                )
                buffer.generator = th.Generator().manual_seed(7)
                buffer.set_offline(data)
                found.append(tuple(buffer.sample(9)))
                rng = np.random.default_rng(8)
                for step in range(50):
                    numbers = rng.normal(size=(4, 2, 2)).astype(np.float32)
                    done = rng.random(2) < 0.2
                    infos = [{"TimeLimit.truncated": bool(one and step % 2)} for one in done]
                    buffer.add(numbers[0], numbers[1], np.tanh(numbers[2]), numbers[3, 0], done, infos)
                    if step % 20 == 19:
                        found.append(tuple(buffer.sample(9)))
    return found


def offline_dataset() -> Any:
    found = []
    rng = np.random.default_rng(9)
    for following in (True, False):
        ends, stop = rng.random(60) < 0.1, rng.random(60) < 0.05
        observations = rng.normal(size=(60, 3))
        after = np.roll(observations, -1, axis=0)
        after[ends] += 1
        data = OfflineDataset.from_arrays(
            *(observations, rng.uniform(-1, 1, (60, 2)), rng.normal(size=60), stop, ends | stop),
            next_observations=after if following else None,
        )
        found += [data.observations, data.actions, data.rewards, data.terminated, data.trajectory_ends]
        found += [data.final_observations, data.next_observations, data.returns, data.trajectories, data.summary()]
        found += [tuple(data.behaviour_return), data.sparse_rewards().rewards if following else 0]
    return found


def kernel_functions() -> Any:
    rng, found = np.random.default_rng(10), []
    for dtype in (np.float32, np.float64):
        shape = (13, 4)
        rewards, values, ratios = (rng.normal(size=shape).astype(dtype) for _ in range(3))
        last = rng.normal(size=4).astype(dtype)
        terminated = rng.random(shape) < 0.1
        truncated = (rng.random(shape) < 0.1) & ~terminated
        ends: dict[str, Any] = {"last_values": last, "terminated": terminated, "truncated": truncated}
        ends["final_values"] = np.where(truncated, 0.5, 0).astype(dtype)
        starts = np.vstack([np.ones((1, 4)), (terminated | truncated)[:-1]]).astype(dtype)
        grouped = rewards.reshape(13, 2, 2)
        alive = np.cumsum(terminated, axis=0).reshape(13, 2, 2) == 0
        found += [
            kernels.compute_gae(rewards, values, gamma=0.97, gae_lambda=0.9, **ends),
            kernels.compute_gae_sb3(rewards, values, starts, last, terminated[-1], 0.97, 0.9),
            kernels.compute_vtrace(0.2 * ratios, rewards, values, gamma=0.97, gae_lambda=0.9, rho_bar=1.1, c_bar=0.9, **ends),
            kernels.compute_lambda_returns(rewards, values, gamma=0.97, gae_lambda=0.9, **ends),
            kernels.compute_group_advantages(rewards[:2], baseline="loo", scale="group"),
            kernels.compute_group_returns_to_go(grouped, alive, 0.97, baseline="median", scale="batch"),
            kernels.compute_process_advantages(grouped, alive),
            kernels.compute_returns_to_go(rewards, terminated, gamma=0.97),
            kernels.compute_gspo_importance_ratios(values[0], ratios[0], np.arange(1, 5)),
            kernels.apply_gspo_clipping(np.exp(values[0]), last),
            kernels.compute_ppo_surrogate(np.exp(values[0]), last),
            kernels.normalize_rewards(rewards[:, 0], 0.1, 1.2, 7),
            kernels.exponential_moving_average(rewards[:, 0], 0.9),
            kernels.clip_rewards(rewards, -0.5, 0.5),
            kernels.auto_scale_rewards(rewards, -2, 3),
            kernels.shape_rewards(rewards, values, ratios, 0.97, terminated),
            kernels.compute_reward_statistics(rewards),
        ]
    return found


def loss_functions() -> Any:
    generator, found = th.Generator().manual_seed(11), []
    log_prob, old, advantages, values = (th.randn(24, generator=generator) for _ in range(4))
    log_prob, segments = (0.3 * log_prob).requires_grad_(), th.arange(24) // 6
    for loss in (
        losses.clipped_surrogate(th.exp(log_prob), advantages, 0.2, 0.3, 2.0).mean(),
        losses.decoupled_surrogate(log_prob, 0.2 * old, 0.3 * old, advantages, 0.2, None, 1.5).mean(),
        losses.gspo_loss(log_prob, 0.3 * old, advantages, segments, 4, 0.2, None).mean(),
        losses.gspo_token_loss(log_prob, 0.3 * old, advantages, segments, 4, 0.2, 0.3).mean(),
        losses.value_loss(log_prob, values, old, 0.2),
        losses.expectile_loss(log_prob - values, 0.8).mean(),
        losses.pessimistic_mean(log_prob.view(3, 8, 1), 0.5).mean(),
        *(estimate(log_prob, th.exp(0.3 * old)).mean() for estimate in (losses.kl_k1, losses.kl_k2, losses.kl_k3)),
    ):
        found += [loss, th.autograd.grad(loss, log_prob)]
    noise = flow.keyed_noise(th.randn(6, 3, generator=generator), flow.multipliers(3), 5, 4)
    found += [noise(1), noise(3)]

    rewards, values, log_rhos, final = (th.randn(11, 4, generator=generator) for _ in range(4))
    last, stop, cut = values[0], rewards > 1.5, rewards < -1.5
    found += list(losses.gae_scan(rewards, values, last, stop, cut, final, 0.97, 0.9))
    found += list(losses.vtrace_scan(0.2 * log_rhos, rewards, values, last, stop, cut, final, 0.97, 0.9))
    found += [losses.group_advantages(rewards), losses.group_returns_to_go(rewards.view(11, 2, 2), ~stop.view(11, 2, 2), 0.97)]
    return found


def flow_functions() -> Any:
    th.manual_seed(12)
    velocity_net, map_net = flow.VelocityNetwork(3, 4, [16, 16]), flow.FlowMapNetwork(3, 4, [16, 16], fourier_dim=8)
    features, actions, noise = th.randn(6, 3), th.rand(6, 4) * 2 - 1, th.randn(6, 4)
    velocity, average = velocity_net.bind(features), map_net.bind(features)
    generator = th.Generator().manual_seed(13)
    depths = flow.sample_depths(6, 5, generator, th.device("cpu"))
    r, t = flow.sample_r_t(6, th.tensor(30.0), 10, 60, generator, th.device("cpu"))
    mask = th.ones(6, 4)
    found = [depths, r, t, flow.euler_forward(velocity, noise, 5), flow.flow_map_sample(average, noise, 3)]
    found += list(flow.flow_map_jvp(average, noise, r, t, (actions, th.zeros_like(r), th.ones_like(t))))
    found += list(flow.euler_reverse(velocity, actions, depths, 5))
    for loss, network in (
        (losses.flow_matching_loss(velocity(noise, t), noise, actions), velocity_net),
        (losses.diagonal_loss(average, actions, noise, t, mask), map_net),
        (losses.eulerian_loss(average, actions, noise, r, t, mask), map_net),
        (losses.lagrangian_loss(average, actions, noise, r, t, mask), map_net),
        (losses.progressive_loss(average, actions, noise, r, t, th.full_like(r, 0.4), mask), map_net),
    ):
        gradients = th.autograd.grad(loss.mean(), list(network.parameters()), allow_unused=True)
        found += [loss, *gradients]
    return found


CASES: Cases = {
    "data replay buffer": replay_buffer,
    "data offline dataset": offline_dataset,
    "kernels": kernel_functions,
    "losses": loss_functions,
    "flow": flow_functions,
}
