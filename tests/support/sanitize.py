"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, driven through the real package: `make sanitize`.

    python tests/support/sanitize.py build LIBRARY       compile csrc/*.cpp into LIBRARY
    python tests/support/sanitize.py run LIBRARY [...]   the tables and the fuzz target, for each instruction set of this CPU

torch is not instrumented, but its memory is AddressSanitizer's: the preloaded malloc puts a forbidden zone around every
tensor, so that a kernel that reads or writes one element beyond its end is seen. The first report ends the process.
"""

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from distutils.core import run_setup  # setuptools provides it where Python no longer does
from pathlib import Path

import torch

from support import ROOT
from support.capabilities import CAPABILITIES

# These follow the flags of setup.py and override them. float-cast-overflow is not part of `undefined`.
FLAGS = [
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=all",
]

# Without the C++ kernels the sanitizers would have nothing to check.
LOADED = """
import os
from addnorm.ops import cpu
assert cpu.ISA is not None and str(cpu.LIBRARY) == os.environ["ADDNORM_LIBRARY"], cpu.DETAIL
print(cpu.ISA)
"""


def build(sources, library):
    """Compile as setup.py does, but with FLAGS; each file in its own process."""
    extension = run_setup(str(ROOT / "setup.py"), stop_after="init").ext_modules[0]
    compiler = [*shlex.split(os.environ.get("CXX", "g++")), "-fPIC"]
    libtorch = f"-L{Path(torch.__file__).parent / 'lib'}"
    library.parent.mkdir(parents=True, exist_ok=True)
    objects = [str(library.with_name(f"{source.stem}.o")) for source in sources]

    def compile_one(source, target):
        command = [
            *compiler,
            *extension.extra_compile_args,
            *FLAGS,
            "-c",
            str(source),
            "-o",
            target,
        ]
        subprocess.run(command, check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources, objects))
    subprocess.run(
        [*compiler, "-shared", *objects, "-o", str(library), libtorch, *extension.extra_link_args, *FLAGS], check=True
    )


def environment(library, capability):
    """Return the environment of a process that runs the package with this library."""
    # The sanitizer's malloc must precede torch's first call of malloc. libstdc++ is preloaded too, since the sanitizer looks up
    # the C++ exception functions that it intercepts when it starts, and Python itself loads no C++.
    preload = [_file(name) for name in ("libasan.so", "libstdc++.so")]
    return os.environ | {
        "LD_PRELOAD": ":".join(preload),
        # No leak detection: Python and torch keep memory until exit on purpose (tests/functional/test_memory.py tests for
        # leaks). Abort: death by a signal cannot be mistaken for a test that failed. And not detect_stack_use_after_return,
        # under which gcc 12 places vectors of AVX-512 on its own stack where they are not aligned.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "abort_on_error=1:print_stacktrace=1",
        "ADDNORM_LIBRARY": str(library),
        "ADDNORM_POISON": "1",
        "ATEN_CPU_CAPABILITY": capability,
    }


def _file(name):
    """Return the path of one of the compiler's runtime libraries."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    done = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = done.stdout.strip()
    if not Path(path).is_absolute():
        raise SystemExit(f"sanitize: {compiler[0]} has no {name}: install the sanitizers of that compiler.")
    return str(Path(path).resolve())


def run(library, arguments):
    """Run the tables, and the fuzz target with these arguments, each in a new process, until one fails."""
    seen = set()
    for capability in CAPABILITIES:
        variables = environment(library, capability)
        command = [sys.executable, "-W", "error", "-c", LOADED]
        loaded = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False)
        if loaded.returncode:
            print(f"== {library} was not loaded: failed with {loaded.returncode}")
            return 1
        if loaded.stdout in seen:  # the requested capability is an upper limit: this CPU has no more
            continue
        seen.add(loaded.stdout)
        for script in (
            ["run_kernels.py", "operation"],
            ["run_kernels.py", "streams", "cover"],
            ["run_kernels.py", "reads", "cover"],
            ["fuzz.py", *arguments],
        ):
            print(f"== {loaded.stdout.strip()}, AddressSanitizer and UBSan: {' '.join(script)}", flush=True)
            command = [sys.executable, "-W", "error", str(Path(__file__).with_name(script[0])), *script[1:]]
            code = subprocess.run(command, env=variables, check=False).returncode
            if code:
                print(f"== failed with {code}")
                return 1
    print("== nothing found")
    return 0


def main():
    match sys.argv[1:]:
        case ["build", library]:
            build(sorted((ROOT / "csrc").glob("*.cpp")), Path(library).resolve())
            return 0
        case ["run", library, *arguments]:
            return run(Path(library).resolve(), arguments)
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
