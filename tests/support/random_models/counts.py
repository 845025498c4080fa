"""Counts of right, refused and wrong inspections by construct, and the file from which docs/streams.md has its table.

PYTHONPATH=tests python -m support.random_models.counts        inspect 2,000 models, write benchmarks/results/random_models.json
"""

import warnings

import torch

import addnorm
from addnorm._util import files, jsonio
from support.judge import judge
from support.loading import ROOT
from support.random_models import random_model

PATH = ROOT / "benchmarks" / "results" / "random_models.json"
NUM_MODELS = 2000
STATUSES = ("right", "refused", "wrong")


def count(seeds):
    """Return the document of counts for models of these seeds, and a sentence for each wrong inspection."""
    constructs = {}
    total = dict.fromkeys(("models", *STATUSES), 0)
    wrong = []
    for seed in seeds:
        case = random_model(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            verdict = judge(addnorm.inspect(case.model, *case.inputs), case.answer)
        status = "refused" if verdict.status == "partly" else verdict.status
        for name in case.answer.constructs:
            empty = dict.fromkeys(("models", *STATUSES), 0) | {"reason": case.answer.reason or case.answer.limit}
            entry = constructs.setdefault(name, empty)
            entry["models"] += 1
            entry[status] += 1
        total["models"] += 1
        total[status] += 1
        if status == "wrong":
            wrong.append(f"{case.describe()}: {verdict}")
    return {"torch": torch.__version__, "total": total, "constructs": dict(sorted(constructs.items()))}, wrong


def list_below(document, share):
    """Return the constructs with rows of which `inspect` is right on less than a share."""
    return [
        f"{name}: {entry['right']} of {entry['models']} right, {entry['refused']} refused"
        for name, entry in document["constructs"].items()
        if not entry["reason"] and entry["right"] < share * entry["models"]
    ]  # fmt: skip


def main():
    """Write the file of counts and print what is wrong or below 95%."""
    torch.set_num_threads(1)
    document, wrong = count(range(NUM_MODELS))
    files.write_text(PATH, jsonio.dumps(document))
    print(*wrong, *list_below(document, 0.95), document["total"], sep="\n")


if __name__ == "__main__":
    main()
