"""Check a kernel repository with the hub's tools: symbols, loading, layers in a model, and errors against float64.

    python hub/check.py build/hub

Needs the packages kernels and kernel-abi-check, and no network.
"""

import sys
from pathlib import Path

import torch
from kernel_abi_check import ObjectFile
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from kernels.layer import replace_kernel_forward_from_hub

MANYLINUX, PYTHON = "manylinux_2_28", "3.9"  # the hub's requirements


class LlamaRMSNorm(torch.nn.Module):
    """RMSNorm as transformers' Llama writes it."""

    def __init__(self, d_model):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(d_model))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states):
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


def main():
    """Print a line for each check; fail at the first that does not hold."""
    repository = Path(sys.argv[1])
    for library in repository.glob("build/*/*.so"):
        found = ObjectFile(library)
        wrong = found.check_manylinux(MANYLINUX) + found.check_python_abi(PYTHON)
        if wrong:
            raise SystemExit(f"{library}: {wrong}")
        print(f"{library.parent.name}: needs nothing newer than {MANYLINUX}, and no Python")
    for cls in (torch.nn.LayerNorm, torch.nn.RMSNorm, LlamaRMSNorm):
        replace_kernel_forward_from_hub(cls, cls.__name__)
        layer = LocalLayerRepository(repository, layer_name=cls.__name__)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for mode in (Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE):
                with use_kernel_mapping({cls.__name__: {"cpu": {mode: layer}}}):
                    worst = compare(cls, dtype, mode)
            print(f"{cls.__name__}, {str(dtype).removeprefix('torch.')}: off by {worst:.1f} eps of the dtype")


def compare(cls, dtype, mode):
    """Return the largest error of y and of the gradients, in machine epsilons of the largest value; at most 4 is right."""
    torch.manual_seed(1)
    ours = cls(96).to(dtype)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter)
    exact = cls(96).double()
    exact.load_state_dict(ours.state_dict())
    ours = kernelize(torch.nn.Sequential(ours), mode=mode, device="cpu", use_fallback=False)
    if type(ours[0]).forward is ours[0].forward.__func__:
        raise SystemExit(f"{cls.__name__} kept its own forward")
    if Mode.TORCH_COMPILE in mode:
        torch.compiler.reset()
        ours = torch.compile(ours, fullgraph=True)
    x, dy = torch.randn(2, 7, 96).to(dtype), torch.randn(2, 7, 96).to(dtype)
    results = []
    for module, kind in ((ours, dtype), (exact, torch.float64)):
        leaf = x.to(kind).requires_grad_()
        y = module(leaf)
        results.append([y, *torch.autograd.grad(y, [leaf, *module.parameters()], dy.to(kind))])
    errors = [(a.double() - b).abs().max() / b.abs().max() for a, b in zip(*results, strict=True)]
    worst = max(errors).item() / torch.finfo(dtype).eps
    if not worst <= 4:
        raise SystemExit(
            f"{cls.__name__} in {dtype} is off by {worst:.1f} eps of the largest value, expected at most 4"
        )
    return worst


if __name__ == "__main__":
    main()
