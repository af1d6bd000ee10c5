"""Export of policies."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch as th
from gymnasium import spaces
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_flow.common.checkpoints import write_atomically
from sb3_flow.common.checks import check_choice
from sb3_flow.common.wrapper_chain import chain
from sb3_flow.deployment.programs import Actions, Chunks, MaskedActions, MaskedRecurrentActions, Program, RecurrentActions
from sb3_flow.offline_to_online.acting import ActingPolicy
from sb3_flow.on_policy.gradient_steps import unchecked_distributions
from sb3_flow.version import __version__

Noise = Literal["input", "keyed"]
SUFFIXES = (".onnx", ".pt2")
PACKAGES = ("sb3_flow", "stable_baselines3", "sb3_contrib")


def export(
    model: Any,
    path: str | Path,
    noise: Noise = "input",
    dynamic_batch: bool = True,
    vec_normalize: VecNormalize | None = None,
) -> None:
    """
    Write a policy as a program from raw observations to actions in the environment's units, which runs without this package.

    The file is an ONNX file or a program of ``torch.export``. The inputs are ``observation`` (or the names of a Dict's
    entries), of the type that the observation space has, and then

    - ``noise`` of RQL, FMQ, FQL, RLPD, DSRL, QAM and FlowMapPolicy with ``acting_mode="sample"`` or ``"best_of_n"``: numbers
      of N(0, 1), fresh for each decision, shape ``(B, n, noise_dim)`` as the metadata say. The output of these policies is a
      chunk of actions, shape ``(B, h, *action_shape)``
    - ``action_masks`` of MaskablePPO, bool, shape ``(B, n_choices)``
    - ``hidden_state``, ``cell_state`` (not of a GRU) and ``episode_start`` of RecurrentPPO, whose states are also outputs, and
      of MaskableRecurrentPPO, which has ``action_masks`` besides

    Policies of the PPO family decide deterministically. The file has its metadata as JSON under the name ``sb3_flow``: the
    shapes of the inputs beside the observation, without the number of observations; ``actions_of_a_decision``, h, or null
    where a decision is one action and the output has no such dimension; whether observations are ``normalized`` inside.

    :param model: an algorithm of this package, PPO or A2C of SB3, MaskablePPO or RecurrentPPO of sb3-contrib, or a policy of
        these
    :param path: of the file, with the ending ``.onnx`` (needs the extra ``onnx``) or ``.pt2``; the file is whole or not there
    :param noise: ``"input"``, or for ``.pt2`` ``"keyed"``: noise is a function of the observation, as in
        ``predict(..., deterministic=True)``
    :param dynamic_batch: any number of observations; False: one
    :param vec_normalize: statistics by which observations are normalised within the program (default: those of the model's
        environment; a policy, and a model that was loaded without environment, have none)
    :raises ValueError: if the policy cannot be exported so, with the reason
    :raises TypeError: if an argument is of another kind
    :raises ImportError: if a package of the extra is missing
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"`path` must be a str or Path, but {path!r} was given.")
    path = Path(path)
    check_choice(("input", "keyed"), noise=noise)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"`path` must end in .onnx or .pt2, but {str(path)!r} was given.")
    if not isinstance(dynamic_batch, bool):
        raise TypeError(f"`dynamic_batch` must be True or False, but {dynamic_batch!r} was given.")
    if not isinstance(vec_normalize, VecNormalize | None):
        raise TypeError(f"`vec_normalize` must be a VecNormalize or None, but {vec_normalize!r} was given.")
    policy = model.policy if isinstance(model, BaseAlgorithm) else model
    if vec_normalize is None and isinstance(model, BaseAlgorithm):
        vec_normalize = _own_normalizer(model)
    program = _program(policy, vec_normalize, noise == "keyed")
    _check_overridden(model, policy)
    if path.suffix == ".onnx":
        _check_onnx(program)
    with _for_tracing(policy), th.no_grad(), unchecked_distributions():
        _write(program.to("cpu"), policy, path, dynamic_batch, type(model).__name__)


@contextmanager
def _for_tracing(policy: Any) -> Iterator[None]:
    """Put a policy into evaluation mode meanwhile. Afterwards it is on its device, and holds no tensors that torch traced."""
    modes, device = {module: module.training for module in policy.modules()}, policy.device
    distribution = getattr(policy, "action_dist", None)
    held = {} if distribution is None else dict(vars(distribution))
    policy.set_training_mode(False)
    try:
        yield
    finally:
        policy.to(device)
        for module, training in modes.items():
            module.training = training
        if distribution is not None:
            vars(distribution).clear()
            vars(distribution).update(held)


def _own_normalizer(model: BaseAlgorithm) -> VecNormalize | None:
    """Find the statistics that normalise the observations of a model's environment."""
    env = model.get_env()
    wrappers = [] if env is None else [each for each in chain(env) if isinstance(each, VecNormalize) and each.norm_obs]
    if len(wrappers) > 1:
        raise ValueError(
            f"Observations of the model's environment are normalised by {len(wrappers)} VecNormalize, but a program "
            "normalises once: export `model.policy`, and normalise before you call the program."
        )
    return wrappers[0] if wrappers else None


def _check_overridden(model: Any, policy: Any) -> None:
    """Refuse classes that decide otherwise than the program that takes their place."""
    replaced = ["predict", "_predict", *(["plan"] if isinstance(policy, ActingPolicy) else [])]
    replaced += ["get_distribution"] if hasattr(policy, "lstm_actor") else []
    for owner, names in ((model, ["predict"]), (policy, replaced)):
        for name in names:
            if getattr(type(owner), name).__module__.split(".")[0] not in PACKAGES:
                raise ValueError(
                    f"{type(owner).__name__} has a `{name}` of its own, which the exported program would not call: override "
                    "what the policy's networks compute instead, such as its features extractor."
                )


def _program(policy: Any, env: VecNormalize | None, keyed: bool) -> Program:
    """Choose the program of a policy."""
    if isinstance(policy, ActingPolicy):
        if policy.acting_mode in ("qgbs", "guided"):
            raise ValueError(
                f'`acting_mode="{policy.acting_mode}"` searches by gradients of the critic, which an exported program cannot: '
                'export the policy with "sample", "zero" or "best_of_n" (`model.set_acting_mode`).'
            )
        return Chunks(policy, env, keyed)
    if not isinstance(policy, ActorCriticPolicy | MaskableActorCriticPolicy):
        raise TypeError(
            "`model` must be an algorithm of this package, SB3's PPO or A2C, or one of their policies, but "
            f"{type(policy).__name__} was given."
        )
    if keyed:
        raise ValueError(f'`noise="keyed"` is for policies that act from noise, but {type(policy).__name__} does not.')
    if hasattr(policy, "lstm_actor"):
        return MaskedRecurrentActions(policy, env) if hasattr(policy, "masked") else RecurrentActions(policy, env)
    if isinstance(policy, MaskableActorCriticPolicy):
        return MaskedActions(policy, env)
    return Actions(policy, env)


def _check_onnx(program: Program) -> None:
    space = program.policy.observation_space
    taken = {*program.inputs(1), *program.outputs} & {*(space.spaces if isinstance(space, spaces.Dict) else ())}
    if taken:
        raise ValueError(
            f"The observation space has the keys {sorted(taken)}, which are names of the program's own inputs and outputs; "
            "names in an ONNX file must differ: export to .pt2, or rename the keys."
        )
    if isinstance(program, Chunks) and program.keyed and program.policy.acting_mode != "zero":
        raise ValueError(
            '`noise="keyed"` computes with 64-bit integers in ways that ONNX has no operators for: give noise="input", or '
            'export to .pt2, or with `acting_mode="zero"`.'
        )
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(f"Export to ONNX needs the package {error.name}: pip install 'sb3-flow[onnx]'") from error


def example(space: spaces.Space[Any], n: int) -> Any:
    """Make n observations of a space, in tensors."""
    if isinstance(space, spaces.Dict):
        return {key: example(part, n) for key, part in space.items()}
    return th.as_tensor(np.zeros((n, *(space.shape or ())), space.dtype))


def _write(program: Program, policy: Any, path: Path, dynamic_batch: bool, name: str) -> None:
    n = 2 if dynamic_batch else 1
    observation, inputs = example(policy.observation_space, n), program.inputs(n)
    arguments = (observation, *inputs.values())
    shapes: Any = None
    if dynamic_batch:
        batch = th.export.Dim("batch", min=1)
        of_observation = {key: {0: batch} for key in observation} if isinstance(observation, dict) else {0: batch}
        of_inputs = tuple({_batch_axis(key): batch} for key in inputs)
        shapes = {"observation": of_observation} | ({"inputs": of_inputs} if inputs else {})
    try:
        exported = th.export.export(program, arguments, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"torch cannot export {type(policy).__name__} ({type(error).__name__}: {reason})") from error
    _drop_unused(exported)
    names = [*(observation if isinstance(observation, dict) else ("observation",)), *inputs]
    metadata = {
        **{"sb3_flow": __version__, "model": name, "policy": type(policy).__name__},
        "inputs": {key: _shape_of_one(key, value) for key, value in inputs.items()},
        "acting_mode": getattr(policy, "acting_mode", None),
        "actions_of_a_decision": program.steps,
        "normalized": bool(program.normalized.keys),
    }
    if path.suffix == ".onnx":
        content = _as_onnx(exported, arguments, names, program.outputs, metadata)
    else:
        content = _as_pt2(exported, metadata)

    def write(file: Any) -> None:
        Path(file).write_bytes(content)

    write_atomically(path, None, write)


def _batch_axis(name: str) -> int:
    return 1 if name.endswith("_state") else 0


def _shape_of_one(name: str, value: th.Tensor) -> list[int]:
    """Give the shape of an input without the number of observations."""
    axis = _batch_axis(name)
    return [*value.shape[:axis], *value.shape[axis + 1 :]]


def _drop_unused(exported: Any) -> None:
    """Take the networks that do not act out of a program: those that trained the others."""
    unused = {node.name: node for node in exported.graph.nodes if node.op == "placeholder" and not node.users}
    specs = exported.graph_signature.input_specs
    for spec in [spec for spec in specs if spec.target is not None and spec.arg.name in unused]:
        specs.remove(spec)
        exported.state_dict.pop(spec.target, None)
        exported.constants.pop(spec.target, None)
        exported.graph.erase_node(unused[spec.arg.name])
    exported.graph_module.recompile()


def _as_pt2(exported: Any, metadata: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    th.export.save(exported, file, extra_files={"sb3_flow": json.dumps(metadata)})
    return file.getvalue()


def _as_onnx(exported: Any, arguments: Any, names: list[str], outputs: tuple[str, ...], metadata: dict[str, Any]) -> bytes:
    options: dict[str, Any] = {"input_names": names, "output_names": list(outputs), "verbose": False}
    found = th.onnx.export(exported, arguments, dynamo=True, optimize=True, **options).model_proto  # type: ignore[union-attr]
    found.metadata_props.add(key="sb3_flow", value=json.dumps(metadata))
    content: bytes = found.SerializeToString()
    return content
