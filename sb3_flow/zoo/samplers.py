"""
Hyperparameters that ``-optimize`` tries: a sampler for each algorithm, and a converter that rebuilds hyperparameters from a
trial (``--storage ... --trial-id``). They build on rl-zoo3's samplers.

Other hyperparameters stay as the configuration says, except ``policy_kwargs``, which the zoo replaces as a whole.
"""

from typing import Any

import optuna
from rl_zoo3 import hyperparams_opt as zoo

Params = dict[str, Any]
MEMORY = ("lstm_hidden_size", "enable_critic_lstm")


def _off_policy(trial: optuna.Trial) -> Params:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 5e-5, 2e-3, log=True),
        "batch_size_pow": trial.suggest_int("batch_size_pow", 6, 9),
        "one_minus_gamma": trial.suggest_float("one_minus_gamma", 0.001, 0.05, log=True),
        "tau": trial.suggest_float("tau", 0.001, 0.05, log=True),
        "horizon_length": trial.suggest_categorical("horizon_length", [1, 3, 5]),
        "net_arch": trial.suggest_categorical("net_arch", ["small", "medium", "large", "verybig"]),
    }


def sample_rql_params(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: Params) -> Params:
    """
    Sample hyperparameters of RQL. ``alpha`` matters most; the ranges of ``alpha`` and ``expectile`` contain all published
    values.

    :param trial: Optuna's trial
    :param n_actions: dimension of the actions (not used)
    :param n_envs: number of environments (not used)
    :param additional_args: of the zoo (not used)
    """
    params = _off_policy(trial)
    params["alpha"] = trial.suggest_float("alpha", 0.03, 30.0, log=True)
    params["expectile"] = trial.suggest_categorical("expectile", [0.5, 0.7, 0.9])
    params["rho"] = trial.suggest_categorical("rho", [0.0, 0.5])
    return convert_rql_params(params)


def sample_fmq_params(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: Params) -> Params:
    """Sample hyperparameters of FMQ: see :func:`sample_rql_params`."""
    params = _off_policy(trial)
    params["n_candidates"] = trial.suggest_categorical("n_candidates", [4, 8, 32])
    params["beta"] = trial.suggest_float("beta", 0.0, 1.0)
    params["radius"] = trial.suggest_categorical("radius", ["released", "published"])
    if params["radius"] == "published":  # the released radius has no eta
        params["eta"] = trial.suggest_float("eta", 0.05, 1.0, log=True)
    return convert_fmq_params(params)


def sample_fql_params(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: Params) -> Params:
    """
    Sample hyperparameters of FQL with the distilled actor: see :func:`sample_rql_params`. ``alpha`` matters most; its range is
    the one that the reference implementation advises for ``normalize_q_loss``, which makes it independent of the rewards.
    """
    params = _off_policy(trial)
    params["alpha"] = trial.suggest_float("alpha", 0.03, 10.0, log=True)
    params["q_aggregation"] = trial.suggest_categorical("q_aggregation", ["mean", "min"])
    return convert_fql_params(params)


def convert_fql_params(sampled_params: Params) -> Params:
    """Turn a trial's record into hyperparameters of FQL: ``alpha`` was tried with ``normalize_q_loss``."""
    return {**zoo.convert_offpolicy_params(sampled_params), "normalize_q_loss": True}


def sample_rlpd_params(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: Params) -> Params:
    """Sample hyperparameters of RLPD: see :func:`sample_rql_params`. Both published versions of the target are tried."""
    params = _off_policy(trial)
    params["rho"] = trial.suggest_categorical("rho", [None, 0.0, 0.5])
    if params["rho"] is None:
        params["n_min_critics"] = trial.suggest_categorical("n_min_critics", [1, 2])
    params["backup_entropy"] = trial.suggest_categorical("backup_entropy", [True, False])
    return convert_rlpd_params(params)


def sample_dsrl_params(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: Params) -> Params:
    """
    Sample hyperparameters of DSRL: see :func:`sample_rql_params`. ``noise_scale`` matters most; the ranges contain all
    published values.
    """
    params = _off_policy(trial)
    params["noise_scale"] = trial.suggest_float("noise_scale", 0.2, 2.0)
    params["rho"] = trial.suggest_categorical("rho", [0.0, 0.5])
    params["target_entropy"] = trial.suggest_categorical("target_entropy", ["auto_0.5", "auto"])
    return convert_dsrl_params(params)


def sample_qam_params(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: Params) -> Params:
    """Sample hyperparameters of QAM: see :func:`sample_rql_params`. ``inv_temp`` matters most; its range is published."""
    params = _off_policy(trial)
    params["inv_temp"] = trial.suggest_float("inv_temp", 0.1, 30.0, log=True)
    params["edit_scale"] = trial.suggest_categorical("edit_scale", [0.0, 0.1, 0.5, 0.9])
    params["rho"] = trial.suggest_categorical("rho", [0.0, 0.5])
    return convert_qam_params(params)


convert_rql_params = convert_fmq_params = convert_rlpd_params = convert_dsrl_params = convert_qam_params = (
    zoo.convert_offpolicy_params
)


def sample_flow_ppo_params(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: Params) -> Params:
    """Sample hyperparameters of PPO, the zoo's and our own: see :func:`sample_rql_params`."""
    params = zoo.sample_ppo_params(trial, n_actions, n_envs, additional_args)
    params["advantage"] = trial.suggest_categorical("advantage", ["gae", "vtrace"])
    params["clip_higher"] = trial.suggest_float("clip_higher", 1.0, 2.0)
    return _clip_higher(params)


def sample_async_ppo_params(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: Params) -> Params:
    """Sample hyperparameters of AsyncPPO: see :func:`sample_rql_params`."""
    params = sample_flow_ppo_params(trial, n_actions, n_envs, additional_args)
    return {**params, "policy_loss": trial.suggest_categorical("policy_loss", ["clip", "decoupled"])}


def sample_recurrent_ppo_params(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: Params) -> Params:
    """Sample hyperparameters of RecurrentPPO, those of PPO and of its memory: see :func:`sample_rql_params`."""
    params = sample_flow_ppo_params(trial, n_actions, n_envs, additional_args)
    params["lstm_hidden_size"] = trial.suggest_categorical("lstm_hidden_size", [32, 64, 128])
    params["enable_critic_lstm"] = trial.suggest_categorical("enable_critic_lstm", [True, False])
    return _memory(params)


def _memory(params: Params) -> Params:
    """Put the arguments of the LSTM or GRU among the policy's."""
    of_policy = {name: params[name] for name in MEMORY}
    others = {name: value for name, value in params.items() if name not in MEMORY}
    return {**others, "policy_kwargs": {**params["policy_kwargs"], **of_policy}}


def _group(trial: optuna.Trial, n_envs: int) -> Params:
    sizes = [size for size in (4, 8, 16, 32) if n_envs % size == 0]
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-5, 5e-3, log=True),
        "batch_size_pow": trial.suggest_int("batch_size_pow", 6, 12),
        "n_epochs": trial.suggest_categorical("n_epochs", [1, 5, 10, 20]),
        "one_minus_gamma": trial.suggest_float("one_minus_gamma", 0.0001, 0.1, log=True),
        "ent_coef": trial.suggest_float("ent_coef", 1e-8, 0.1, log=True),
        "clip_range": trial.suggest_categorical("clip_range", [0.1, 0.2, 0.3, 0.4]),
        "clip_higher": trial.suggest_float("clip_higher", 1.0, 2.0),
        "max_grad_norm": trial.suggest_float("max_grad_norm", 0.3, 2.0),
        "group_size": trial.suggest_categorical("group_size", sizes or [n_envs]),
        "scale": trial.suggest_categorical("scale", ["batch", "group", "none"]),
        "net_arch": trial.suggest_categorical("net_arch", ["tiny", "small", "medium"]),
        "activation_fn": trial.suggest_categorical("activation_fn", ["tanh", "relu"]),
    }


def sample_grpo_params(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: Params) -> Params:
    """Sample hyperparameters of GRPO. ``n_steps``, the longest episode, is no choice: see :func:`sample_rql_params`."""
    aggregation = trial.suggest_categorical("aggregation", ["step", "episode", "constant"])
    return convert_group_params({**_group(trial, n_envs), "aggregation": aggregation})


def sample_gspo_params(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: Params) -> Params:
    """Sample hyperparameters of GSPO: see :func:`sample_grpo_params`."""
    credit = trial.suggest_categorical("credit", ["outcome", "return_to_go"])
    return convert_group_params({**_group(trial, n_envs), "credit": credit})


def _clip_higher(params: Params) -> Params:
    """Compute the upper clip range, which is tried as a multiple of the lower clip range."""
    params = dict(params)
    params["clip_range_high"] = params["clip_range"] * params.pop("clip_higher")
    return params


def convert_on_policy_params(sampled_params: Params) -> Params:
    """Turn a trial's record into hyperparameters of PPO."""
    return _clip_higher(zoo.convert_onpolicy_params(sampled_params))


def convert_recurrent_params(sampled_params: Params) -> Params:
    """Turn a trial's record into hyperparameters of RecurrentPPO."""
    return _memory(convert_on_policy_params(sampled_params))


def convert_group_params(sampled_params: Params) -> Params:
    """Turn a trial's record into hyperparameters of GRPO or GSPO: without GAE's parameter, which has no effect there."""
    params = convert_on_policy_params({"one_minus_gae_lambda": 0.0, **sampled_params})
    del params["gae_lambda"]
    return params


def register() -> None:
    """Hand the samplers and converters to rl-zoo3."""
    by_algorithm: dict[str, tuple[Any, Any]] = {
        "rql": (sample_rql_params, convert_rql_params),
        "fmq": (sample_fmq_params, convert_fmq_params),
        "fql": (sample_fql_params, convert_fql_params),
        "rlpd": (sample_rlpd_params, convert_rlpd_params),
        "dsrl": (sample_dsrl_params, convert_dsrl_params),
        "qam": (sample_qam_params, convert_qam_params),
        "flow_ppo": (sample_flow_ppo_params, convert_on_policy_params),
        "recurrent_ppo": (sample_recurrent_ppo_params, convert_recurrent_params),
        "maskable_ppo": (sample_flow_ppo_params, convert_on_policy_params),
        "maskable_recurrent_ppo": (sample_recurrent_ppo_params, convert_recurrent_params),
        "grpo": (sample_grpo_params, convert_group_params),
        "gspo": (sample_gspo_params, convert_group_params),
        "async_ppo": (sample_async_ppo_params, convert_on_policy_params),
    }
    for algorithm, (sampler, converter) in by_algorithm.items():
        zoo.HYPERPARAMS_SAMPLER[algorithm], zoo.HYPERPARAMS_CONVERTER[algorithm] = sampler, converter
