"""Use an installed wheel in a process of its own and print one line of JSON: which kernels run, and how far they are from float64."""

import json
import subprocess
import sys
import sysconfig

import torch

import addnorm
from addnorm.bench import exactness, jobs
from addnorm.bench.case import Case


def main():
    """Compare outputs and gradients with float64, then use the tools and the command line."""
    torch.manual_seed(0)
    worst = {dtype: compare(dtype) for dtype in ("float32", "bfloat16", "float16")}
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
    """Return the largest error of y, z, the gradients and `out=`, in roundings of the dtype of the largest value."""
    case = Case(norm="layer", job="forward_backward", rows=3, d=100, dtype=dtype)
    tensors = jobs.inputs(case)
    results = exactness.results(case, jobs.ours(case), tensors)
    exact = exactness.truth(case, tensors, results)
    with torch.no_grad():
        out = jobs.ours(case.but(job="reuse"))(*tensors.args, torch.empty_like(results["y"]))
    pairs = [(out, exact["y"]), *((results[name], t) for name, t in exact.items())]
    worst = max(float((ours.double() - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)
    return round(worst / torch.finfo(out.dtype).eps, 2)


if __name__ == "__main__":
    main()
