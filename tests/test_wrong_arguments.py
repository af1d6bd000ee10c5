"""Arguments that cannot be meant: refused by name, or, if they only change nothing, a warning that says so."""

import inspect
import io
import re
import warnings
from pathlib import Path

import optuna
import pytest
from on_policy import ACTION_SPACES, walks
from stable_baselines3 import A2C, DQN, SAC, TD3
from stable_baselines3 import PPO as SB3PPO
from tasks import PointEnv, collect
from zoo_commands import mistake

from sb3_flow import (
    DSRL,
    FMQ,
    FQL,
    GRPO,
    GSPO,
    PPO,
    QAM,
    RLPD,
    RQL,
    AsyncPPO,
    FlowMapPolicy,
    MaskablePPO,
    MaskableRecurrentPPO,
    RecurrentPPO,
)

NAN = float("nan")
ON_POLICY = {PPO: {}, GRPO: {"group_by": "none"}, GSPO: {"group_by": "none"}, MaskablePPO: {}, RecurrentPPO: {}, AsyncPPO: {}}
ON_POLICY[MaskableRecurrentPPO] = {}
OFF_POLICY = {
    RQL: {"n_critics": 2, "flow_steps": 2},
    FMQ: {"n_candidates": 2},
    FQL: {"flow_steps": 2},
    RLPD: {"n_critics": 2},
    DSRL: {"n_critics": 2},
}
OFF_POLICY |= {QAM: {"n_critics": 2, "flow_steps": 2}}
ALL = [*ON_POLICY, *OFF_POLICY]


def build(algorithm, **given):
    """:return: a tiny model"""
    policy_kwargs = {"net_arch": [4], **given.pop("policy_kwargs", {})}
    if algorithm in OFF_POLICY:
        small = {"batch_size": 4, "buffer_size": 50, "learning_starts": 2, **OFF_POLICY[algorithm]}
        return algorithm("MlpPolicy", PointEnv(), **{**small, **given}, policy_kwargs=policy_kwargs, device="cpu")
    recurrent = issubclass(algorithm, RecurrentPPO)
    policy_kwargs = {"lstm_hidden_size": 4, **policy_kwargs} if recurrent else policy_kwargs
    small = {"n_steps": 8, "batch_size": 4, "n_epochs": 1, **ON_POLICY[algorithm], **given}
    env = walks(2, ACTION_SPACES["discrete"])
    return algorithm("MlpLstmPolicy" if recurrent else "MlpPolicy", env, **small, policy_kwargs=policy_kwargs, device="cpu")


def flow_map_policy(**given):
    env = PointEnv()
    return FlowMapPolicy(env.observation_space, env.action_space, lambda _: 1e-3, **{"net_arch": [4], **given})


# ------------------------------------------------------------------------------------------------------------------- values

WRONG_ON_POLICY = [
    ("clip_range", -0.1),
    ("clip_range_high", -0.1),
    ("learning_rate", -1.0),
    ("max_grad_norm", -1),
    ("target_kl", NAN),
    ("n_epochs", -1),
    ("n_epochs", 1.5),
    ("batch_size", 0),
    ("batch_size", -1),
    ("batch_size", 2.5),
    ("n_steps", 0),
    ("n_steps", 2.5),
    ("gamma", "high"),
]
WRONG_OFF_POLICY = [
    ("buffer_size", 0),
    ("buffer_size", -1),
    ("learning_starts", -1),
    ("learning_starts", NAN),
    ("learning_rate", -1.0),
    ("gradient_steps", -5),
    ("gradient_steps", 1.5),
    ("batch_size", 2.5),
    ("horizon_length", 1.5),
    ("n_steps", 0),
    ("n_candidates", 2.5),
    ("tau", "slow"),
]
WRONG = [
    *((algorithm, *case) for algorithm in ON_POLICY for case in WRONG_ON_POLICY),
    *((algorithm, *case) for algorithm in OFF_POLICY for case in WRONG_OFF_POLICY),
    *((RQL, *case) for case in (("flow_steps", 2.5), ("n_critics", 2.5), ("alpha", float("inf")), ("rho", NAN))),
    *((FQL, *case) for case in (("flow_steps", 2.5), ("n_critics", 0), ("alpha", -1.0), ("normalize_q_loss", "yes"))),
    *(
        (RLPD, *case)
        for case in (("n_critics", 0), ("rho", NAN), ("bc_alpha", -1.0), ("backup_entropy", "yes"), ("ent_coef", "a"))
    ),
    *(
        (RLPD, *case)
        for case in (("n_min_critics", 0), ("policy_delay", 0), ("target_entropy", NAN), ("offline_fraction", 2.0))
    ),
    *((DSRL, "noise_scale", given) for given in (0, -1.0, NAN, float("inf"), "wide")),
    *((DSRL, *case) for case in (("rho", -1.0), ("ent_coef", "automatic"), ("ent_coef", -0.1), ("target_entropy", NAN))),
    *((QAM, name, -1.0) for name in ("inv_temp", "edit_scale", "rho", "max_grad_norm", "ent_coef")),
    *((QAM, *case) for case in (("flow_steps", 2.5), ("n_critics", 0), ("inv_temp", NAN), ("target_entropy", "low"))),
    *((FMQ, "anneal_end_step", given) for given in (-1, NAN)),
    *((FMQ, "reanchor_every", given) for given in (-1, 1.5)),
    *((FMQ, *case) for case in (("eta", float("inf")), ("adaptive_radius", "yes"), ("normalize_gradient", "no"))),
    *((algorithm, "vf_coef", -1.0) for algorithm in (PPO, MaskablePPO, RecurrentPPO, AsyncPPO)),  # GRPO has no critic
    *((algorithm, "group_size", given) for algorithm in (GRPO, GSPO) for given in (1, 2.5)),
    *((AsyncPPO, "collector_timeout", given) for given in (NAN, 0, -1.0)),
    *((AsyncPPO, *case) for case in (("learner_threads", 0), ("max_policy_lag", 1.5), ("n_slots", 2.5))),
]


@pytest.mark.parametrize(("algorithm", "name", "given"), WRONG, ids=lambda one: getattr(one, "__name__", None))
def test_values_that_cannot_be_meant(algorithm, name, given):
    with pytest.raises(ValueError, match=f"`{name}` must be .*{given}"):
        build(algorithm, **{name: given})


@pytest.mark.parametrize("algorithm", ALL)
@pytest.mark.parametrize("net_arch", [[0], [8, -1], [2.5], {"pi": [4], "qf": [0], "vf": [0]}], ids=str)
def test_layers_without_units(algorithm, net_arch):
    with pytest.raises(ValueError, match="`net_arch` must be made of whole numbers of at least 1, but "):
        build(algorithm, policy_kwargs={"net_arch": net_arch})


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("n_sampling_steps", 0),
        ("n_sampling_steps", 1.5),
        ("lsd_gradient", "both"),
        ("q_aggregation", "max"),
        ("warmup_steps", NAN),
        ("anneal_end_step", -1),
        ("horizon_length", 1.5),
        ("n_critics", -1),
        ("n_candidates", 2.5),
        ("net_arch", [0]),
    ],
)
def test_values_of_the_policy(name, given):
    with pytest.raises(ValueError, match=f"`{name}` must be "):
        flow_map_policy(**{name: given})
    if name not in ("horizon_length", "net_arch", "n_candidates"):
        with pytest.raises(ValueError, match=f"`{name}` must be "):
            build(FMQ, policy_kwargs={name: given})
    with pytest.raises(ValueError, match="`execution_horizon` must be from 1 to"):
        flow_map_policy(horizon_length=3, execution_horizon=1.5)


@pytest.mark.parametrize("given", [{"eta": NAN}, {"rho": NAN}, {"completion": "x"}, {"beam_width": 1.5}], ids=str)
def test_settings_of_the_search(given):
    for algorithm in (RQL, FMQ, FQL):  # DSRL has no search
        with pytest.raises(ValueError, match=f"`{next(iter(given))}` must be "):
            build(algorithm, search=given)


@pytest.mark.parametrize("algorithm", ALL)
@pytest.mark.parametrize("given", [{"total_timesteps": NAN}, {"total_timesteps": -1}, {"log_interval": 0}], ids=str)
def test_learn(algorithm, given):
    model = build(algorithm)
    with pytest.raises(ValueError, match=f"`{next(iter(given))}` must be at least"):
        model.learn(**{"total_timesteps": 8, **given})
    assert model.num_timesteps == 0


@pytest.fixture(scope="module")
def dataset():
    return collect(PointEnv(), episodes=2)


@pytest.mark.parametrize(
    ("name", "given"),
    [("gradient_steps", 2.5), ("gradient_steps", NAN), ("log_interval", 0), ("eval_freq", 0), ("n_eval_episodes", 0)],
)
@pytest.mark.parametrize("algorithm", OFF_POLICY)
def test_learn_offline(algorithm, name, given, dataset):
    model = build(algorithm)
    with pytest.raises(ValueError, match=f"`{name}` must be "):
        model.learn_offline(dataset, **{"gradient_steps": 1, "eval_env": PointEnv(), name: given})
    with pytest.raises(ValueError, match="`offline_steps` must be a whole number"):
        build(algorithm, offline_dataset=dataset, offline_steps=1.5)
    assert model.offline_updates == 0
    model.learn_offline(dataset, 1e0)  # a float, and a whole number


def test_learn_behaviour(dataset):
    for given in ({"gradient_steps": 2.5}, {"batch_size": 1.5}):
        with pytest.raises(ValueError, match=f"`{next(iter(given))}` must be a whole number"):
            flow_map_policy().learn_behaviour(dataset, **{"gradient_steps": 1, **given})


@pytest.mark.parametrize("name", ["learning_rate", "clip_range", "clip_range_high"])
def test_schedules_that_turn_negative(name):
    """But not beyond the end of training, where those of SB3 do."""
    model = build(PPO, **{name: lambda progress: 0.1 * progress})
    model.learn(20)  # two rollouts of 16
    assert model._current_progress_remaining < 0
    with pytest.raises(ValueError, match=f"`{name}` must be at least 0, but -0.* by its schedule"):
        build(PPO, **{name: lambda progress: 0.1 * (progress - 0.9)}).learn(64)
    if name == "learning_rate":
        with pytest.raises(ValueError, match="`learning_rate` must be at least 0"):
            build(RQL, learning_rate=lambda progress: progress - 0.5).learn(30)


# ------------------------------------------------------------------------------------------------------- without an effect

IDLE = [
    (FMQ, {"eta": 0.3}, "eta"),
    (FMQ, {"beta": 0.5, "adaptive_radius": False}, "beta"),
    (FMQ, {"radius": "published", "adaptive_radius": False}, "radius"),
    (FMQ, {"lsd_gradient": "diagonal"}, "lsd_gradient"),
    (FQL, {"alpha": 3.0, "actor_type": "best_of_n"}, "alpha"),
    (FQL, {"normalize_q_loss": True, "actor_type": "best_of_n"}, "normalize_q_loss"),
    (FQL, {"search": {"beam_width": 2}}, "search"),
    (RLPD, {"n_min_critics": 1, "rho": 0.5}, "n_min_critics"),
    (RLPD, {"target_entropy": -1.0, "ent_coef": 0.1}, "target_entropy"),
    (DSRL, {"target_entropy": "auto", "ent_coef": 0.1}, "target_entropy"),
    (QAM, {"ent_coef": 0.1}, "ent_coef"),
    (QAM, {"target_entropy": -1.0}, "target_entropy"),
    (QAM, {"target_entropy": -1.0, "ent_coef": 0.1, "edit_scale": 0.1}, "target_entropy"),
    (PPO, {"dual_clip": 2.0}, "dual_clip"),
    (PPO, {"rho_bar": 2.0}, "rho_bar"),
    (MaskablePPO, {"c_bar": 0.5}, "c_bar"),
    (RecurrentPPO, {"reference_policy": "initial"}, "reference_policy"),
    (GSPO, {"dual_clip": 2.0}, "dual_clip"),
    (GRPO, {"group_size": 2}, "group_size"),
    (GRPO, {"shared_noise": True}, "shared_noise"),
    (GRPO, {"credit": "process", "baseline": "mean"}, "baseline"),
    (GRPO, {"credit": "process", "scale": "group"}, "scale"),
    (GRPO, {"scale": "none", "ddof": 1}, "ddof"),
    (AsyncPPO, {"max_policy_lag": 1}, "max_policy_lag"),
    (AsyncPPO, {"n_slots": 3, "mode": "sync"}, "n_slots"),
]


@pytest.mark.parametrize(("algorithm", "given", "name"), IDLE, ids=lambda one: getattr(one, "__name__", None))
def test_arguments_without_effect_say_so(algorithm, given, name):
    with pytest.warns(UserWarning, match=f"`{name}` has no effect here: .*`"):
        build(algorithm, **given)


USED = [
    (FMQ, {"eta": 0.3, "radius": "published"}),
    (FMQ, {"eta": 0.3, "adaptive_radius": False}),
    (FMQ, {"lsd_gradient": "diagonal", "distillation": "lsd"}),
    (FQL, {"alpha": 3.0, "normalize_q_loss": True}),
    (FQL, {"actor_type": "best_of_n"}),
    (RLPD, {"n_min_critics": 1}),
    (RLPD, {"rho": 0.5, "bc_alpha": 0.1}),
    (DSRL, {"target_entropy": "auto", "ent_coef": "auto_0.1"}),
    (QAM, {"ent_coef": "auto_0.1", "target_entropy": -1.0, "edit_scale": 0.1}),
    (PPO, {"rho_bar": 2.0, "advantage": "vtrace"}),
    (PPO, {"rho_bar": 2.0, "policy_loss": "decoupled"}),
    (GRPO, {"credit": "process", "ddof": 1}),
    (AsyncPPO, {"n_slots": 3, "mode": "free"}),
    *((algorithm, {}) for algorithm in ALL),
]


@pytest.mark.parametrize(("algorithm", "given"), USED, ids=lambda one: getattr(one, "__name__", None))
def test_arguments_with_an_effect_do_not(algorithm, given):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        build(algorithm, **given)


@pytest.mark.parametrize(("algorithm", "options"), [(GRPO, {}), (GSPO, {}), (PPO, {"advantage": "group"})])
def test_rollouts_in_which_no_episode_ends(algorithm, options):
    """There was no word of it, though "whole episodes" are compared."""
    model = build(algorithm, n_steps=5, **options)
    model.set_env(walks(2, ACTION_SPACES["discrete"], mean_length=10**9))
    with pytest.warns(UserWarning, match=r"No episode ended within `n_steps=5` steps: .* the environments' time limit"):
        model.learn(1)


def test_the_zoo_tunes_what_has_an_effect():
    pytest.importorskip("rl_zoo3")
    from sb3_flow.zoo.samplers import sample_fmq_params

    for radius in ("released", "published"):
        trial = optuna.trial.FixedTrial(
            {"learning_rate": 1e-3, "batch_size_pow": 6, "one_minus_gamma": 0.01, "tau": 0.01, "horizon_length": 1}
            | {"net_arch": "small", "n_candidates": 4, "beta": 0.1, "eta": 0.3, "radius": radius}
        )
        assert ("eta" in sample_fmq_params(trial, 1, 1, {})) == (radius == "published")


# --------------------------------------------------------------------------------------------------------------- given twice


@pytest.mark.parametrize(
    ("algorithm", "name", "own", "other", "kwargs"),
    [
        (RQL, "n_critics", 3, 2, "policy_kwargs"),
        (RQL, "flow_steps", 3, 2, "policy_kwargs"),
        (RQL, "horizon_length", 3, 2, "policy_kwargs"),
        (FMQ, "horizon_length", 3, 2, "policy_kwargs"),
        (FMQ, "n_candidates", 3, 2, "policy_kwargs"),
        (FMQ, "distillation", "psd", "lsd", "policy_kwargs"),
        (FQL, "actor_type", "best_of_n", "distilled", "policy_kwargs"),
        (FQL, "acting_mode", "zero", "sample", "policy_kwargs"),
        (RLPD, "ent_coef", 0.2, 0.1, "policy_kwargs"),
        (DSRL, "noise_scale", 0.5, 0.8, "policy_kwargs"),
        (QAM, "edit_scale", 0.1, 0.2, "policy_kwargs"),
        (RQL, "sampling", "transition", "trajectory", "replay_buffer_kwargs"),
        (FMQ, "offline_fraction", 0.5, 0.2, "replay_buffer_kwargs"),
    ],
)
def test_given_twice(algorithm, name, own, other, kwargs, tmp_path):
    """The value in the dictionary was taken by a part of the model, and the other one by the rest."""
    with pytest.raises(ValueError, match=f"`{name}` was given twice: {own!r}, and in `{kwargs}` {other!r}"):
        build(algorithm, **{name: own, kwargs: {name: other}})
    default = inspect.signature(algorithm).parameters[name].default
    for given in ({name: own, kwargs: {name: own}}, {name: default, kwargs: {name: own}}):  # once, or the same
        model = build(algorithm, **given)
        part = model.policy if kwargs == "policy_kwargs" else model.replay_buffer
        assert getattr(model, name) == getattr(part, name) == own
        assert name not in getattr(model, kwargs)
    model.save(tmp_path / "model")
    loaded = algorithm.load(tmp_path / "model")
    assert getattr(loaded, name) == own and name not in getattr(loaded, kwargs)


def test_files_in_which_an_argument_was_given_twice(tmp_path):
    """From before it was refused: ``policy_kwargs`` had the last word."""
    model = build(RQL, n_critics=3)
    model.n_critics, model.policy_kwargs = 2, {"net_arch": [4], "n_critics": 3}
    model.save(tmp_path / "model")
    assert RQL.load(tmp_path / "model").n_critics == 3


# ---------------------------------------------------------------------------------------------------------- unknown arguments


@pytest.mark.parametrize("algorithm", ALL)
def test_unknown_policy_kwargs(algorithm):
    with pytest.raises(TypeError, match=rf"`policy_kwargs` of {algorithm.__name__}: .* `net_arhc`: did you mean `net_arch`\?"):
        build(algorithm, policy_kwargs={"net_arhc": [4]})
    with pytest.raises(TypeError, match=rf"`policy_kwargs` of {algorithm.__name__}: .* `qqq`: it has .*net_arch, "):
        build(algorithm, policy_kwargs={"qqq": 1})


def test_arguments_that_a_policy_hides_are_taken():
    class Own(PPO.policy_aliases["MlpPolicy"]):
        def __init__(self, *args, **kwargs):
            self.depth = kwargs.pop("depth")
            super().__init__(*args, **kwargs)

    model = PPO(Own, walks(2, ACTION_SPACES["discrete"]), policy_kwargs={"depth": 3, "net_arch": [4]})
    assert model.policy.depth == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'"):  # of something else
        build(PPO, rollout_buffer_class=type(model.rollout_buffer).__bases__[1], rollout_buffer_kwargs={"wrong": 1})


@pytest.mark.parametrize("called", [PPO, GRPO, GSPO, AsyncPPO])
def test_unknown_arguments(called):
    with pytest.raises(TypeError, match=rf"{called.__name__}.__init__\(\) got an unexpected keyword argument 'clip_rang'"):
        build(called, clip_rang=0.1)


def test_unknown_arguments_of_a_policy():
    """Its signature lists every argument, so Python itself refuses others, and a type checker does before."""
    with pytest.raises(TypeError, match=r"FlowMapPolicy.* unexpected keyword argument 'n_candidate'"):
        flow_map_policy(n_candidate=3)


@pytest.mark.parametrize(
    ("algo", "given", "message"),
    [
        ("rql", "alhpa:1.0", "RQL has no argument `alhpa`: did you mean `alpha`?"),
        ("gspo", "clip_rang:0.1", "GSPO has no argument `clip_rang`: did you mean `clip_range`?"),
        ("flow_ppo", "n_env:4", "PPO has no argument `n_env`: did you mean `n_envs`?"),
    ],
)
def test_unknown_hyperparameters_of_the_zoo(algo, given, message, tmp_path):
    env = "Pendulum-v1" if algo == "rql" else "CartPole-v1"
    for command in ("train", "optimize"):
        assert mistake(command, "--algo", algo, "--env", env, "-f", tmp_path, "-params", given) == f"error: {message}"


# ------------------------------------------------------------------------------------------------- files of other algorithms

OTHERS = {
    "A2C": lambda: A2C("MlpPolicy", "CartPole-v1"),
    "DQN": lambda: DQN("MlpPolicy", "CartPole-v1", buffer_size=10),
    "PPO": lambda: SB3PPO("MlpPolicy", "CartPole-v1"),
    "SAC": lambda: SAC("MlpPolicy", "Pendulum-v1", buffer_size=10, policy_kwargs={"net_arch": [4]}),
    "TD3": lambda: TD3("MlpPolicy", "Pendulum-v1", buffer_size=10, policy_kwargs={"net_arch": [4]}),
}
SAVERS = {f"ours: {one.__name__}": lambda one=one: build(one) for one in ALL} | OTHERS
OPEN_EACH_OTHER = {"PPO", "AsyncPPO"}


@pytest.mark.parametrize("saver", SAVERS)
def test_files_of_other_algorithms(saver, tmp_path):
    path, name = tmp_path / "model.zip", saver.removeprefix("ours: ")
    SAVERS[saver]().save(path)
    for algorithm in ALL:
        if algorithm.__name__ == name or {algorithm.__name__, name} <= OPEN_EACH_OTHER:
            assert algorithm.load(path).policy is not None
            continue
        words = f"`{algorithm.__name__}.load` was given a file that {name} saved: {path}; `{name}.load` opens it"
        with pytest.raises(ValueError, match=re.escape(words)):
            algorithm.load(path)
    with pytest.raises(ValueError, match=f"`FlowMapPolicy.load` was given a file that {name} saved"):
        FlowMapPolicy.load(path)
    with open(path, "rb") as file, pytest.raises(ValueError, match=f"a file that {name} saved"):
        (FMQ if name == "RQL" else RQL).load(file)


def test_files_of_subclasses_and_policies_of_ones_own(tmp_path):
    class Mine(RQL):
        pass

    class Entropic(PPO):
        def __init__(self, *args, **kwargs):
            self.target_entropy = self.flow_steps = 1.0
            super().__init__(*args, **kwargs)

    class Masked(MaskablePPO.policy_aliases["MlpPolicy"]):
        pass

    small = {"policy_kwargs": {"net_arch": [4]}, "n_critics": 2, "buffer_size": 10}
    Mine("MlpPolicy", PointEnv(), **small).save(tmp_path / "mine")
    assert RQL.load(tmp_path / "mine").n_critics == Mine.load(str(tmp_path / "mine")).n_critics == 2
    Entropic("MlpPolicy", walks(2, ACTION_SPACES["discrete"])).save(tmp_path / "entropic")
    assert Entropic.load(tmp_path / "entropic").target_entropy == PPO.load(tmp_path / "entropic").target_entropy == 1.0
    MaskablePPO(Masked, walks(2, ACTION_SPACES["discrete"])).save(tmp_path / "masked")
    assert type(MaskablePPO.load(tmp_path / "masked").policy).__name__ == "Masked"
    memory = io.BytesIO()
    build(PPO).save(memory)
    memory.seek(0)
    assert isinstance(PPO.load(memory), PPO)
    with pytest.raises(ValueError, match="wasn't a zip-file"):  # SB3's words
        Path(tmp_path / "text.zip").write_text("no model")
        RQL.load(tmp_path / "text.zip")
    with pytest.raises(FileNotFoundError):
        RQL.load(tmp_path / "nowhere")
