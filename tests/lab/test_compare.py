"""Tests of `addnorm.lab.compare`: results are reused, interrupted comparisons resume, and backends agree."""

import os
import socket
import sys
import threading
from dataclasses import replace

import pytest

from addnorm import Row, Wiring, wirings
from addnorm.lab import RunError, compare
from addnorm.lab.train import train
from support.lab_runs import FEW_STACKS, TEXT, measured, quick, small
from support.refusals import assert_raises

module = sys.modules["addnorm.lab.compare"]


@pytest.fixture(autouse=True)
def few_stacks(monkeypatch):
    for setting in FEW_STACKS:
        monkeypatch.setattr(*setting)


@pytest.fixture
def computed(monkeypatch):
    """Return the names of the results computed in this process."""
    names = []
    work = module._work

    def spy(job, *args):
        names.append(job.name)
        return work(job, *args)

    monkeypatch.setattr(module, "_work", spy)
    return names


def compare_locally(compared, protocol=None, **options):
    options = {"text": TEXT, "jobs": 1, "at_init": False, **options}
    return compare(compared, protocol or quick(), **options)


def stored(folder):
    return (folder / "results.jsonl").read_bytes()


def test_compare_result_equals_train():
    comparison = compare_locally(["post_ln", "pre_ln"])
    assert [measured(run) for run in comparison.runs] == [
        {**measured(train(small(name), TEXT)), "torch": comparison.runs[0]["torch"]} for name in ("post_ln", "pre_ln")
    ]
    assert {"date", "addnorm", "torch"} <= set(comparison.runs[0])
    assert (comparison.text["name"], comparison.text["digest"]) == ("counting", TEXT.digest)


@pytest.mark.parametrize(
    ("old", "new"), [('"test":', '"test":"x","t":'), ('"diverged":', '"d":'), ('"losses":[', '"losses":2,"l":[')]
)
def test_compare_refuses_damaged_results(tmp_path, computed, old, new):
    compare_locally(["post_ln"], out=tmp_path)
    file = tmp_path / "results.jsonl"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(
        ValueError, match=r"results\.jsonl has a damaged result with key \w+, without its \w+: remove the line"
    ):
        compare_locally(["post_ln"], out=tmp_path)
    assert len(computed) == 1


def test_compare_computes_only_missing_results(tmp_path, computed):
    compare_locally(["post_ln"], out=tmp_path)
    lines = stored(tmp_path)
    comparison = compare_locally(["pre_ln", "post_ln"], quick(seeds=(0, 1)), out=tmp_path)
    assert len(computed) == 1 + 3
    assert stored(tmp_path).startswith(lines)
    assert [(run["settings"]["wiring"], run["settings"]["seed"]) for run in comparison.runs] == [
        (name, seed) for seed in (0, 1) for name in ("pre_ln", "post_ln")
    ]
    compare_locally(["pre_ln"], quick(steps=9), out=tmp_path)
    assert len(computed) == 4 + 1


def test_wirings_with_equal_rows_share_a_result(tmp_path, computed):
    mine = Wiring("mine", lambda at: Row(norm_in=True), final_norm=True)
    comparison = compare_locally(["pre_ln", mine, wirings.mix_ln(k=0)], out=tmp_path, at_init=True)
    assert len(computed) == 2
    assert [run["settings"]["wiring"] for run in comparison.runs] == ["pre_ln", "mine", "mix_ln(k=0)"]
    assert len({run["test"] for run in comparison.runs}) == 1
    assert {row["wiring"] for row in comparison.at_init} == {"pre_ln", "mine", "mix_ln(k=0)"}
    assert not any("lowest test loss" in finding.claim for finding in comparison.verdict)


def test_compare_without_directory_keeps_nothing(computed):
    compare_locally(["pre_ln"])
    compare_locally(["pre_ln"])
    assert len(computed) == 2


def test_only_the_parent_process_writes(tmp_path, monkeypatch):
    pids = []
    append = module.ResultStore.append
    monkeypatch.setattr(
        module.ResultStore, "append", lambda self, result: (pids.append(os.getpid()), append(self, result))
    )
    mine = Wiring("mine", lambda at: Row(norm_in=True, b=1 / at.number))
    comparison = compare_locally([mine, "post_ln"], out=tmp_path, jobs=2)
    assert pids == [os.getpid()] * 2
    assert [measured(run) for run in comparison.runs] == [
        measured(run) for run in compare_locally([mine, "post_ln"]).runs
    ]
    assert list((tmp_path / "open").iterdir()) == []


REFUSED = {
    "ValueError: compared is empty, expected at least one wiring": ([], {}),
    "ValueError: compared has pre_ln 2 times": (["pre_ln", wirings.pre_ln()], {}),
    "ValueError: compared has a wiring named 'pre_ln' that differs from addnorm's": ([Wiring("pre_ln", Row(norm_out=True))], {}),
    "ValueError: wiring is 'preln'": (["preln"], {}),
    "ValueError: jobs is 0": (["pre_ln"], {"jobs": 0}),
    "ValueError: cluster is 'nowhere', expected the address of a Dask scheduler": (["pre_ln"], {"cluster": "nowhere"}),
    "has 5 characters": (["pre_ln"], {"text": replace(TEXT, text="short")}),
    "has 0 characters": (["pre_ln"], {"text": replace(TEXT, text=""), "training": False}),
    "TypeError: text is str, expected a lab.Text": (["pre_ln"], {"text": "book.txt"}),
    "TypeError: protocol is int, expected a lab.Protocol": (["pre_ln"], {"protocol": 3}),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_compare_refuses_wrong_arguments_before_any_run(sentence, computed):
    wirings_compared, options = REFUSED[sentence]
    assert_raises(sentence, lambda: compare_locally(wirings_compared, **options))
    assert computed == []


def test_missing_packages_are_named_with_their_extra(monkeypatch):
    for missing, options in (("joblib", {}), ("distributed", {"cluster": "tcp://127.0.0.1:1"})):
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(ImportError, match=rf"{missing} is not installed.*addnorm\[lab\]"):
            compare_locally(["pre_ln"], **options)
        monkeypatch.undo()


def test_failed_run_is_named_and_results_stay(tmp_path, computed, monkeypatch):
    protocol = quick(seeds=(0, 1))

    def fail(run, *args, **options):
        return train(run, *args, **options) if run.name == "post_ln" else 1 / 0

    monkeypatch.setattr(module, "train", fail)
    with pytest.raises(
        RunError,
        match=r"^run pre_ln, 2 layers, lr 0\.001, no warm-up, seed 0 failed, ZeroDivisionError: division by zero$",
    ):
        compare_locally(["post_ln", "pre_ln"], protocol, out=tmp_path)
    assert computed[0] == "run post_ln, 2 layers, lr 0.001, no warm-up, seed 0"
    assert len(stored(tmp_path).splitlines()) == 1
    computed.clear()
    compare_locally(["post_ln"], protocol, out=tmp_path)
    assert computed == ["run post_ln, 2 layers, lr 0.001, no warm-up, seed 1"]


def test_killed_process_raises_run_error(tmp_path):
    compare_locally(["post_ln"], out=tmp_path)
    before = stored(tmp_path)
    parent = os.getpid()

    def rule(at):
        if os.getpid() != parent:
            os.kill(os.getpid(), 9)
        return Row(norm_in=True)

    deadly = Wiring("deadly", rule)
    with pytest.raises(
        RunError, match=r"a process was lost \(TerminatedWorkerError\), perhaps for lack of memory: repeat the call"
    ):
        compare_locally(["post_ln", deadly, "pre_ln"], quick(seeds=(0, 1)), out=tmp_path, jobs=2)
    assert stored(tmp_path).startswith(before)


def test_missing_scheduler_raises_value_error(monkeypatch):
    distributed = pytest.importorskip("distributed")

    class Impatient(distributed.Client):
        def __init__(self, *args, **options):
            super().__init__(*args, **{**options, "timeout": "1s"})

    monkeypatch.setattr(distributed, "Client", Impatient)
    with pytest.raises(
        ValueError, match=r"^cluster is 'tcp://127\.0\.0\.1:1', where no Dask scheduler answers \(.*\)\.$"
    ):
        compare_locally(["pre_ln"], cluster="tcp://127.0.0.1:1")


def test_other_server_is_no_scheduler():
    """The length of the answer's frames is then some letters, read as a number."""
    pytest.importorskip("distributed")

    def answer():
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.recv(10_000)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"where no Dask scheduler answers \(.*\)\.$"):
            compare_locally(["pre_ln"], cluster=address)


@pytest.fixture
def cluster():
    """Yield the address of a local Dask scheduler with a worker process."""
    distributed = pytest.importorskip("distributed")
    computed = distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None, silence_logs=50
    )
    yield computed.scheduler_address
    computed.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # distributed leaves its own sockets open
def test_dask_cluster_gives_the_same_results(tmp_path, cluster):
    from distributed import Client

    with Client(cluster, set_as_default=False) as client:
        pids = set(client.run(os.getpid).values())
    assert len(pids - {os.getpid()}) == 1
    wirings_compared = ["post_ln", Wiring("mine", lambda at: Row(norm_in=True, b=1 / at.number))]
    comparison = compare(wirings_compared, quick(), text=TEXT, out=tmp_path, cluster=cluster)
    local = compare_locally(wirings_compared, at_init=True)
    assert [*map(measured, comparison.runs)] == [*map(measured, local.runs)]
    assert [*map(measured, comparison.stacks)] == [*map(measured, local.stacks)]
    assert comparison.to_dict()["verdict"] == local.to_dict()["verdict"]
