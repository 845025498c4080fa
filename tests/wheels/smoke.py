"""Use an installed wheel in a process of its own and print one line of JSON: which kernels run, and how far they are from float64."""

import json
import subprocess
import sys
import sysconfig

import torch

import addnorm

f64 = torch.float64


def main():
    """Compare outputs and gradients with float64, then use the tools and the command line."""
    torch.manual_seed(0)
    worst = {
        str(dtype).removeprefix("torch."): compare(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    stack = addnorm.ResidualStack([torch.nn.Linear(64, 64) for _ in range(4)], 64, wiring="pre_ln")
    stack(torch.randn(2, 5, 64)).sum().backward()
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    x = torch.randn(2, 5, 32)
    inspection = addnorm.inspect(model, x)
    with torch.no_grad():
        program = torch.export.export(addnorm.AddNorm(32), (x, x))
        off = (program.module()(x, x) - addnorm.AddNorm(32)(x, x)).abs().max().item()
    commands = subprocess.run(
        [sys.executable, "-m", "addnorm", "wirings", "post_ln"], capture_output=True, text=True, check=False
    )
    row = {
        "python": sys.version.split()[0] + ("t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""), "torch": torch.__version__,
        "kernels": next(one.detail for one in addnorm.backends() if one.name == "cpu"), "worst": worst,
        "wiring": inspection.wiring, "export": off, "command": commands.returncode, "stderr": commands.stderr[-300:],
    }  # fmt: skip
    print(json.dumps(row))


def compare(dtype):
    """Return the largest error of y, z and the gradients, in roundings of the dtype of the largest value."""
    inputs = [torch.randn(3, 100, dtype=dtype), torch.randn(3, 100, dtype=dtype), torch.randn(100), torch.randn(100)]
    outputs = []
    for cast in (lambda t: t.clone(), lambda t: t.to(f64)):
        x, branch, weight, bias = leaves = [cast(t).requires_grad_() for t in inputs]
        if x.dtype == dtype:
            results = addnorm.add_layer_norm(*leaves, return_residual=True)
        else:
            results = exact(x, branch, weight, bias, dtype)
        y, z = (t.to(f64) for t in results)
        grads = torch.autograd.grad((y * torch.linspace(-1, 2, 100)).sum() + z.sin().sum(), leaves)
        outputs.append([y, z, y, *grads])
    with torch.no_grad():
        outputs[0][2] = addnorm.add_layer_norm(*inputs, out=torch.empty(3, 100, dtype=dtype))
    worst = max(
        float((ours.to(f64) - theirs).detach().abs().max() / theirs.detach().abs().max())
        for ours, theirs in zip(*outputs, strict=True)
    )
    return round(worst / torch.finfo(dtype).eps, 2)


def exact(x, branch, weight, bias, dtype):
    """Return the norm of the sum that was rounded to the dtype, in float64, and the sum."""
    z = x + branch
    z = z + (z.detach().to(dtype).to(f64) - z.detach())
    return torch.nn.functional.layer_norm(z, (100,), weight, bias), z


if __name__ == "__main__":
    main()
