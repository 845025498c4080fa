"""Layers whose `forward` takes the place of that of a norm with the same attributes."""

import torch

from .norms import layer_norm, rms_norm


class LayerNorm(torch.nn.Module):
    """`torch.nn.LayerNorm`."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.Module):
    """`torch.nn.RMSNorm`."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class LlamaRMSNorm(torch.nn.Module):
    """RMSNorm of transformers' Llama, Qwen and Mistral: rounds before it multiplies by `weight`; eps is `variance_epsilon`."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon, casting="llama")
