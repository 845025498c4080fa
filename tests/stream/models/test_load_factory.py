"""A factory of the user's own, module.path:factory: what it may return, and how all else is refused in a sentence."""

import sys

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import save_file

from addnorm.stream.models.factory import FACTORY
from addnorm.stream.models.load import load
from support.named_models import no_network, run, sentence


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    no_network(monkeypatch)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A function that writes the user's module into the current directory and gives a name for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    names = []

    def write(result, module=None):
        module = module or f"mine_{tmp_path.name}_{len(names)}".replace("-", "_")
        names.append(module)
        (tmp_path / f"{module}.py").write_text(
            "import torch\nfrom torch import nn\n"
            f"def build():\n    model = nn.Linear(3, 2)\n    x = torch.ones(4, 3)\n    return {result}\n"
            "class Made:\n    @staticmethod\n    def build():\n        return build()\n"
            "number = 3\n"
        )
        return f"{module}:build"

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("result", "args", "kwargs"),
    [
        ("model, (x,)", 1, set()),
        ("model, [x]", 1, set()),
        ("model, x", 1, set()),
        ("model, (), {'input': x}", 0, {"input"}),
    ],
)
def test_a_factory_gives_the_model_and_its_inputs(mine, result, args, kwargs):
    loaded = load(mine(result))
    assert (len(loaded.args), loaded.kwargs.keys()) == (args, kwargs)
    assert not loaded.model.training
    assert run(loaded).shape == (4, 2)


def test_a_factory_may_be_a_method_and_has_a_seed_and_a_dtype(mine):
    name = mine("model, x").replace(":", ":Made.")
    one, again, other = (load(name, seed=seed, dtype="float64") for seed in (1, 1, 2))
    assert run(one).dtype == torch.float64
    assert torch.equal(one.model.weight, again.model.weight)
    assert not torch.equal(one.model.weight, other.model.weight)


def test_a_factory_s_model_takes_inputs_from_a_file_or_if_it_is_of_transformers_drawn_ones(mine, tmp_path):
    save_file({"input": torch.ones(5, 3)}, tmp_path / "in.safetensors")
    assert run(load(mine("model"), inputs=tmp_path / "in.safetensors")).shape == (5, 2)
    theirs = (
        "__import__('transformers').BertModel(__import__('transformers').BertConfig(hidden_size=24, vocab_size=50))"
    )
    assert run(load(mine(theirs))).last_hidden_state.shape == (2, 16, 24)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("3", "returned int, expected an nn.Module, (model, args) or (model, args, kwargs)"),
        ("(x, model)", "returned (Tensor, Linear), expected"),
        ("()", "returned (), expected"),
        ("model, x, {}, 4", "returned (Linear, Tensor, dict, int), expected"),
        ("model, {'input': x}", "returned args as dict, expected a tuple; keywords come third"),
        ("model, (), {1: x}", "returned kwargs as dict, expected a dict with names as its keys"),
        ("model", "returned a model without inputs"),
        ("1 / 0", "whose call without arguments fails (ZeroDivisionError: division by zero)"),
        ("exit(3)", "whose call without arguments fails (SystemExit: 3)"),
    ],
)
def test_what_a_factory_may_not_return(mine, result, words):
    assert words in sentence(mine(result))


def test_a_factory_that_is_not_there(mine):
    name = mine("model, x").partition(":")[0]
    assert f"whose module no_{name} cannot be imported from" in sentence(f"no_{name}:build")
    assert f"but {name} has no bild, expected a function; near it is build" in sentence(f"{name}:bild")
    assert "which is int, expected a function" in sentence(f"{name}:number")
    assert "(SyntaxError: " in sentence(mine("model x"))


def test_what_is_the_name_of_a_factory():
    assert all(map(FACTORY.fullmatch, ("a:b", "a.b:c.d", "_a1:b_")))
    assert not any(map(FACTORY.fullmatch, ("a", ":b", "a:", "a:b:c", "a b:c", "C:\\model", "1a:b", "a..b:c")))


def test_a_factory_needs_no_transformers(mine, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(load(mine("model, x"))).shape == (4, 2)
