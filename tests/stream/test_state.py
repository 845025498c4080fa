"""Property: after a tool has called a model, the next calls of the model have the bits that they have without the tool."""

import pytest
import torch
from torch import nn

import addnorm
from support import stateful_functions, stateful_tensors  # noqa: F401 (they register their classes)
from support.stateful_models import STATES, D, make_model
from support.stream_steps import noise
from support.unrestored_models import UNRESTORED, Unrestored

X = noise(2, 5, D, seed=1)
REFUSED = {"LazyInList"}  # by inspect
UNCOPIED = {"Context", "Queue", "ThreadLocal"}  # copy.deepcopy refuses them
FUSED = ("BufferAndNumber", "Closure", "WrittenParameter", "Sparse", "Generator")
# Copies share this state in classes and functions
# fuse refuses these models: torch.compile's frontend ignores their state.
UNFUSED = {"CachedFunction", "CachedMethod", "NestedContainers", "Deque", "ClassAttribute", "DefaultArgument"}
UNTRAINED = {"NewAttribute"}
NAMES = [name for name in STATES if name not in REFUSED]


def call_twice(model):
    with torch.no_grad():
        return [model(X) for _ in range(2)]


def assert_unchanged(names, use):
    """Check the next two calls of a model after `use(model)` against a model that was not used."""
    expected = call_twice(make_model(*names))
    model = make_model(*names)
    use(model)
    for k, (y, z) in enumerate(zip(call_twice(model), expected, strict=True)):
        assert torch.equal(y, z), (names, k)


@pytest.mark.parametrize("name", STATES)
def test_inspect_keeps_state(name):
    def use(model):
        if name in REFUSED:
            with pytest.raises(RuntimeError, match="uninitialized"):
                addnorm.inspect(model, X)
        else:
            assert addnorm.inspect(model, X).streams

    assert_unchanged([name], use)


def fuse(model):
    addnorm.fuse(model, X, benchmark=False)
    addnorm.unfuse(model)


def ablate_each(model):
    addnorm.ablate_each(addnorm.inspect(model, X), X, sites=())


@pytest.mark.parametrize(
    ("tool", "names"),
    [
        (lambda model: addnorm.decompose(model, X), NAMES),
        (lambda model: addnorm.inspect(model, X, float64=True), [name for name in NAMES if name not in UNCOPIED]),
        (ablate_each, NAMES),
        (fuse, FUSED),
    ],
    ids=["decompose", "float64", "ablate_each", "fuse"],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_tools_keep_state(tool, names):
    assert_unchanged(names, tool)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:Dynamo d")  # and what torch.compile does not trace
@pytest.mark.parametrize("name", NAMES)
def test_fuse_keeps_each_state(name):
    def use(model):
        try:
            fuse(model)
        except addnorm.VerificationError:
            assert name in UNFUSED
        except RuntimeError:  # its own second call would go through its graph again, too
            assert name in UNTRAINED

    assert_unchanged([name], use)


def test_recorded_call_is_the_first():
    expected = call_twice(make_model(*NAMES))
    model = make_model(*NAMES)
    with torch.no_grad(), addnorm.record(model):
        first = model(X)
        addnorm.inspect(model, X)
    assert torch.equal(first, expected[0])
    assert torch.equal(call_twice(model)[0], expected[1])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_inspect_keeps_state_after_an_error(error):
    class Fails(nn.Module):
        def forward(self, x):
            raise error("in the middle")

    def use(model):
        model.append(Fails())
        with pytest.raises(error, match="in the middle"):
            addnorm.inspect(model, X)
        model.pop(-1)

    assert_unchanged(NAMES, use)


@pytest.mark.parametrize("name", UNRESTORED)
def test_inspect_names_state_it_cannot_restore(name, tmp_path):
    with (tmp_path / "file").open("w") as file, pytest.warns(UserWarning, match="not restored") as warned:
        addnorm.inspect(Unrestored(name, file).eval(), X)
    changed = f"support.unrestored_models.{name}" if name.isidentifier() else name
    for warning in warned:
        assert str(warning.message).startswith(f"a call of Unrestored changed {changed}")


def test_inspect_does_not_warn_of_variables_that_stay():
    model = Unrestored("NUMBER", None).eval()
    model.change = lambda held: None
    addnorm.inspect(model, X)  # a warning would be an error
