"""Files that a hostile user passes to the command line: empty, cut off, binary, of another kind, with code in them."""

import json
import os

import torch

FACTORIES = """
import sys, torch
from torch import nn

class Toy(nn.Module):
    def __init__(self, last=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = last

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x if self.last is None else self.last(x)

def fail(error):
    raise error

x, value, model = torch.randn(2, 3, 8), 3, Toy()
def toy(): return Toy(), (x,)
def exits(): sys.exit(3)
def exits_in_forward(): return Toy(lambda y: sys.exit(7)), (x,)
def fails(): raise ValueError("first\\nsecond")
def fails_in_forward(): return Toy(lambda y: 1 / 0), (x,)
def misses_file(): return Toy(lambda y: open("/nonexistent/x")), (x,)
def needs_memory(): return Toy(lambda y: fail(MemoryError())), (x,)
def recurse(y): return recurse(y)
def recurses(): return Toy(recurse), (x,)
def interrupts(): raise KeyboardInterrupt
def nothing(): pass
def with_argument(size): return toy()
def of_nan(): return Toy(), (x * float("nan"),)
def of_empty(): return Toy(), (x[:0],)
def of_text(): return Toy(lambda y: "text"), (x,)
def of_integers(): return Toy(lambda y: y.long()), (x,)
def alone(): return Toy()
def wrong_keyword(): return Toy(), (), {"y": x}
def number_as_keyword(): return Toy(), (), {3: x}
def list_as_keywords(): return Toy(), (), [x]
def four(): return Toy(), (), {}, 1
def generator(): yield Toy()
def prints(): print("hello from the model"); return Toy(lambda y: [print("and from its forward"), y][1]), (x,)
def without_eval():
    model = Toy()
    model.train = lambda mode: fail(NotImplementedError("Calling eval() is not supported yet."))  # as modules of torch.export
    return model, (x,)
def counts():
    calls = iter(range(1, 1000))  # a tool restores lists, not iterators
    return Toy(lambda y: y * next(calls)), (x,)
"""


class Code:
    """Object whose unpickling runs a command."""

    def __reduce__(self):
        return os.system, ("touch HARM",)


BINARY = bytes(range(255, 0, -1))
RECORDING = {"schema": "addnorm.recording", "schema_version": 1}
TEXTS = {
    "texts.txt": b"Norms keep the scale.\nThe stream carries everything.\n",
    "empty.txt": b"", "blank.txt": b"\n \n\t\n", "latin.txt": b"na\xefve", "utf16.txt": "Norms".encode("utf-16"), "binary.txt": BINARY,
    "cut.json": b'{"schema": "addnorm.recording", "sites": [', "empty.json": b"", "list.json": b"[1, 2]", "null.json": b"null",
    "other.json": json.dumps({"schema": "addnorm.comparison"}).encode(), "future.json": json.dumps(RECORDING | {"schema_version": 99}).encode(),
    "missing.json": json.dumps(RECORDING).encode(), "types.json": json.dumps(RECORDING | {"sites": 5}).encode(),
    "binary.json": BINARY, "deep.json": b"[" * 100_000, "binary.parquet": BINARY,
    "binary.pt": BINARY, "empty.pt": b"", "binary.safetensors": BINARY,
    "cut/config.json": b"{", "untyped/config.json": b"{}", "unknown/config.json": b'{"model_type": "nope"}', "listed/config.json": b"[]",
    "weightless/config.json": b'{"model_type": "gpt2"}', "junk/config.json": b'{"model_type": "gpt2"}', "junk/model.safetensors": BINARY,
    "remote/config.json": b'{"model_type": "x", "auto_map": {"AutoModel": "evil.Model"}}', "remote/evil.py": b"open('HARM', 'w')",
    "hostile.py": FACTORIES.encode(), "broken.py": b"def f(:\n", "importing.py": b"import nothing_like_this", "exiting.py": b"import sys; sys.exit('usage')",
    "site/export.json": b'{"files": ["data/meta.js"]}', "site/index.html": b"not of the export", "torn/results.jsonl": b"torn\n", "foreign/results.jsonl": b'{"kind": "run"}\n',
}  # fmt: skip
TENSORS = {
    "list.pt": [1, 2], "scalar.pt": {"a": 1}, "numbered.pt": {3: torch.ones(1)}, "code.pt": {"x": Code()},
    "typo.pt": {"input_idz": torch.ones(1, 4, dtype=torch.long)}, "ids.pt": {"input_ids": torch.ones(1, 4, dtype=torch.long)},
    "large.pt": {"input_ids": torch.full((1, 4), 99999)}, "floats.pt": {"input_ids": torch.ones(1, 4)}, "none.pt": {"input_ids": torch.ones(0, 4).long()},
}  # fmt: skip


def make_hostile_files(folder):
    """Write all files into a folder."""
    for name, content in TEXTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    for name, value in TENSORS.items():
        torch.save(value, folder / name)
    for name in ("folder", "folder.json", "folder.html", "addnorm-compare"):
        (folder / name).mkdir()
    for name, target in {"loop": "loop", "nowhere": "gone", "full.json": "/dev/full", "null.html": "/dev/null"}.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe.json")
