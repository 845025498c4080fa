"""Results of the table in docs/routes.md: every route with every operation, compared with eager mode.

PYTHONPATH=tests python tests/support/route_results.py                          measure all cells; takes ten minutes
PYTHONPATH=tests python tests/support/route_results.py --route DDP ONNX         measure these routes, and keep the other cells
PYTHONPATH=tests python tests/support/route_results.py --operation MiniLM       measure this operation, and keep the others

The cells go to benchmarks/results/routes.json; docs/_build/page.py routes writes the page. A slow test repeats all of them.
"""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from addnorm._util import files, jsonio
from addnorm.bench import environment
from support import ROOT, route_calls, route_processes
from support.distributed import run_cases
from support.route_calls import SAME_BITS
from support.route_models import OPERATIONS

PATH = ROOT / "benchmarks" / "results" / "routes.json"
ROUTES = (*route_calls.ROUTES, *route_processes.ROUTES)
# Two results that are rounded in different orders differ by up to twice the error of one. Another factor of two is for the
# largest of a few numbers, which varies.
FACTOR = 4
FLOAT32_ONLY = ("AOTInductor", "ONNX")  # for serving; onnxruntime lacks float64 kernels, and compiling takes a minute
TIMEOUT = 900  # seconds of a cell in two processes: MiniLM is fused twice


def tolerance(error, dtype):
    """Return the tolerance of a cell from the error of eager mode in float32."""
    return FACTOR * error * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps


def list_cells():
    """Return route, operation and dtype of every cell, those of an operation together."""
    return [
        (route, name, dtype)
        for name, operation in OPERATIONS.items()
        for dtype in operation.dtypes
        for route in ROUTES
        if dtype == torch.float32 or route not in FLOAT32_ONLY
    ]


def measure_processes(route, name):
    """Return the rows of a cell in two processes, by dtype: the worse of the processes' results."""
    key = route_processes.name_case(route, name)
    results = run_cases(Path(route_processes.__file__), route_processes.WORLD_SIZE, [key], TIMEOUT)[key]
    for ok, value in results:
        if not ok:
            raise RuntimeError(f"{route}, {name}: {value}")
    ranks = [value for _, value in results]
    return {dtype: merge([rank[dtype] for rank in ranks]) for dtype in ranks[0]}


def merge(rows):
    """Return the row of all processes."""
    merged = {}
    for key in ("outputs", "gradients"):
        errors = [row[key] for row in rows if row[key] != SAME_BITS]
        merged[key] = max(errors, default=SAME_BITS)
    return {**merged, "fused": all(row["fused"] for row in rows)}


def agrees(row, measured, limit, *, bits=True):
    """Return what a new measurement contradicts in a row, or nothing.

    `bits` is False for routes that compute a part of the batch: whether a matrix product has the same bits then depends on
    the machine.
    """
    for key in ("outputs", "gradients"):
        before, now = row[key], measured[key]
        if (before is None) != (now is None):
            return f"{key}: {now} is not {before}"
        if before is None or now == SAME_BITS:
            continue
        if (bits and before == SAME_BITS) or not now <= limit:
            return f"{key} differ by {now:.1e}, tolerance {0.0 if bits and before == SAME_BITS else limit:.1e}"
    return "" if row["fused"] == measured["fused"] else f"fused is {measured['fused']}, expected {row['fused']}"


def write(errors, rows):
    """Write the results, the rows in the order of the cells."""
    described = environment.describe()
    order = {(route, name, str(dtype)): i for i, (route, name, dtype) in enumerate(list_cells())}
    keyed = {(row["route"], row["operation"], row["dtype"]): row for row in rows}
    document = {
        "schema": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": described["machine"]["cpu"]},
        "versions": described["versions"],
        "factor": FACTOR,
        "errors": errors,
        "rows": [keyed[key] for key in sorted(keyed, key=lambda key: order[key])],
    }
    files.write_text(PATH, jsonio.dumps(document))


def read():
    """Return the results, or a document without cells."""
    return jsonio.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {"errors": {}, "rows": []}


def main(words):
    """Measure cells and write each to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--route", nargs="+", choices=ROUTES, default=[*ROUTES])
    parser.add_argument("--operation", nargs="+", choices=OPERATIONS, default=[*OPERATIONS])
    given = parser.parse_args(words)
    torch.set_num_threads(1)

    def store(route, name, dtype, row):
        print(route, name, dtype, row, file=sys.stderr, flush=True)
        document = read()  # another process may have added cells
        cell = {"route": route, "operation": name, "dtype": dtype}
        others = [one for one in document["rows"] if {key: one[key] for key in cell} != cell]
        write(document["errors"] | errors, [*others, {**cell, **row}])

    errors = {}
    for name in given.operation:
        if {*given.route} & {*route_calls.ROUTES}:
            errors[name] = route_calls.measure_error(OPERATIONS[name])
        for dtype in OPERATIONS[name].dtypes:
            for route in given.route:
                if (route, name, dtype) in list_cells() and route in route_calls.ROUTES:
                    store(route, name, str(dtype), route_calls.measure(route, OPERATIONS[name], dtype))
        for route in given.route:
            if route in route_processes.ROUTES:
                for dtype_name, row in measure_processes(route, name).items():
                    store(route, name, dtype_name, row)


if __name__ == "__main__":
    main(sys.argv[1:])
