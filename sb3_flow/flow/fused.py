"""
Whole MLPs with tanh-GELU as single autograd functions: torch's matrix products, compiled kernels in between.

For networks of the size RL uses, the time outside matrix products (autograd's bookkeeping, copies of biases, reductions of
their gradients, activations) otherwise exceeds that inside. CPU and float32 only, see :func:`can_fuse`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch as th

from sb3_flow.flow.activations import LAYER_NORM_EPS
from sb3_flow.kernels import activations as kernels


def can_fuse(*tensors: th.Tensor) -> bool:
    """
    :param tensors: input and parameters
    :return: whether all of them are float32 on the CPU, outside of torch.compile, torch.func and forward-mode derivatives
        (none of which can look into a kernel) and of autocast (which would change the matrix products' type)
    """
    return (
        all(tensor.device.type == "cpu" and tensor.dtype == th.float32 for tensor in tensors)
        and not th.compiler.is_compiling()
        and not th.is_autocast_enabled("cpu")
        and th._C._functorch.peek_interpreter_stack() is None
        and th.autograd.forward_ad._current_level < 0
    )


def _batched(weight: th.Tensor) -> th.Tensor:
    """:return: weight as ``(K, in, out)``; it may be an ``nn.Linear``'s, ``(out, in)``"""
    return weight if weight.dim() == 3 else weight.t().unsqueeze(0)


class _FusedMLP(th.autograd.Function):
    @staticmethod
    def forward(ctx: Any, n_layers: int, inputs: th.Tensor, *parameters: th.Tensor) -> th.Tensor:
        weights, biases = parameters[:n_layers], parameters[n_layers : 2 * n_layers]
        norms = parameters[2 * n_layers :]
        # Without gradients of the parameters the backward pass needs no layer's input
        learns = any(ctx.needs_input_grad[2:])
        members, batch = (len(weights[0]) if weights[0].dim() == 3 else 1), len(inputs)
        hidden = inputs.unsqueeze(0).expand(members, -1, -1)
        saved, hiddens = [], [hidden]
        spare = None
        for i in range(n_layers - 1):
            z = hidden @ _batched(weights[i])
            out = spare if spare is not None and spare.shape == z.shape else th.empty_like(z)
            bias = biases[i].view(members, -1).numpy()
            if norms:
                statistics = z.new_empty(2, members, batch)
                scale, shift = norms[2 * i][:, 0].numpy(), norms[2 * i + 1][:, 0].numpy()
                kernels.gelu_layer_norm_forward(
                    z.numpy(), bias, scale, shift, LAYER_NORM_EPS, out.numpy(), *statistics.numpy()
                )
                saved.append((z, statistics))
            else:
                kernels.gelu_forward(z.numpy(), bias, out.numpy())
                saved.append((z, None))
            hidden = out
            if learns:
                hiddens.append(hidden)
            else:
                spare = hidden
        ctx.n_layers, ctx.learns, ctx.saved, ctx.hiddens = n_layers, learns, saved, hiddens
        ctx.save_for_backward(*parameters)
        return th.baddbmm(biases[-1].view(members, 1, -1), hidden, _batched(weights[-1]))

    @staticmethod
    @th.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: th.Tensor) -> tuple[th.Tensor | None, ...]:  # type: ignore[override]
        n_layers, learns = ctx.n_layers, ctx.learns
        parameters = [parameter.detach() for parameter in ctx.saved_tensors]
        weights, biases, norms = parameters[:n_layers], parameters[n_layers : 2 * n_layers], parameters[2 * n_layers :]
        grads = [th.empty_like(parameter) for parameter in parameters]
        members = len(grad_out)
        grad = grad_out.contiguous()
        if learns:
            grads[2 * n_layers - 1] = grad.sum(1).view_as(biases[-1])
        for i in reversed(range(n_layers)):
            if learns:
                if weights[i].dim() == 3:
                    th.bmm(ctx.hiddens[i].mT, grad, out=grads[i])
                else:
                    th.mm(grad[0].t(), ctx.hiddens[i][0], out=grads[i])
            if i == 0:
                break
            grad = grad @ _batched(weights[i]).mT
            z, statistics = ctx.saved[i - 1]
            bias, grad_bias = (tensor.view(members, -1).numpy() for tensor in (biases[i - 1], grads[n_layers + i - 1]))
            if norms:
                j = 2 * (i - 1)
                scale = norms[j][:, 0].numpy()
                grad_scale, grad_shift = (grads[2 * n_layers + n][:, 0].numpy() for n in (j, j + 1))
                kernels.gelu_layer_norm_backward(
                    z.numpy(), bias, scale, *statistics.numpy(), grad.numpy(), grad_bias, grad_scale, grad_shift
                )
            else:
                kernels.gelu_backward(z.numpy(), bias, grad.numpy(), grad_bias)
        grad_inputs = None
        if ctx.needs_input_grad[1]:
            grad_inputs = (grad @ _batched(weights[0]).mT).sum(0)
        return None, grad_inputs, *(grads if learns else [None] * len(grads))


def fused_mlp(
    inputs: th.Tensor, weights: Sequence[th.Tensor], biases: Sequence[th.Tensor], norms: Sequence[th.Tensor] = ()
) -> th.Tensor:
    """
    MLP of K members on a shared input: linear, GELU and, where ``norms`` are given, LayerNorm; the last layer is linear.

    :param inputs: shape ``(B, in)``
    :param weights: of all layers, shape ``(K, in, out)``; ``(out, in)`` as ``nn.Linear`` has it where K = 1
    :param biases: of all layers, shape ``(K, 1, out)`` or ``(out,)``
    :param norms: scale and shift of the first hidden layer, of the second, ..., shape ``(K, 1, out)``
    :return: shape ``(K, B, out)``
    """
    return _FusedMLP.apply(len(weights), inputs, *weights, *biases, *norms)  # type: ignore[no-any-return]


def fused_velocity(
    features: th.Tensor, weights: Sequence[th.Tensor], biases: Sequence[th.Tensor]
) -> Callable[[th.Tensor, th.Tensor], th.Tensor]:
    """
    The velocity field of one batch of observations, without gradients: the many evaluations of an integration share their
    buffers and the first layer's product with the features.

    :param features: shape ``(B, features_dim)``
    :param weights: of all layers, shape ``(out, in)``
    :param biases: of all layers, shape ``(out,)``
    :return: ``velocity(x, t)``
    """
    batch, features_dim = features.shape
    transposed = [weight.detach().t() for weight in weights]
    rows = [bias.detach() for bias in biases]
    from_features = th.addmm(rows[0], features.detach(), transposed[0][:features_dim])
    transposed[0] = transposed[0][features_dim:]
    scratch = {n: features.new_empty(2, batch, n) for n in {weight.shape[1] for weight in transposed[:-1]}}
    steps = []
    for i, weight in enumerate(transposed[:-1]):
        z, out = scratch[weight.shape[1]]
        # Of the first layer each sample has a bias of its own: a batch of members
        first = (z.unsqueeze(1).numpy(), from_features.numpy(), out.unsqueeze(1).numpy())
        steps.append((weight, z, out, first if i == 0 else (z[None].numpy(), rows[i][None].numpy(), out[None].numpy())))

    def velocity(x: th.Tensor, t: th.Tensor) -> th.Tensor:
        hidden = th.cat([x, t], dim=-1)
        for weight, z, out, arrays in steps:
            th.mm(hidden, weight, out=z)
            kernels.gelu_forward(*arrays)
            hidden = out
        return th.addmm(rows[-1], hidden, transposed[-1])

    return velocity
