"""Tests that everything that depends on the options agrees with their declaration."""

import inspect
import runpy

import pytest

import addnorm
from addnorm.ops.options import ADD_OPTIONS, DTYPE_OPTIONS, OPTIONS
from support import ROOT
from support.cases import VARIANTS

ALL, OF_ADD, DTYPES = ({option.name for option in options} for options in (OPTIONS, ADD_OPTIONS, DTYPE_OPTIONS))
FUNCTIONS = {
    addnorm.add_layer_norm: ALL - {"casting"},
    addnorm.add_rms_norm: ALL,
    addnorm.add_residual: OF_ADD | {"residual_dtype"},
    addnorm.add_layer_norm_: ALL - DTYPES - {"casting"},
    addnorm.add_rms_norm_: ALL - DTYPES,
    addnorm.add_residual_: OF_ADD,
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_signatures_have_the_declared_options(function):
    parameters = inspect.signature(function).parameters
    others = {"residual", "branch", "weight", "bias", "eps", "return_residual", "normalized_shape", "training", "out"}
    assert set(parameters) - others == FUNCTIONS[function]
    for option in OPTIONS:
        if option.name in parameters:
            assert parameters[option.name].default == option.default, option.name


def test_header_of_the_cpp_code_is_up_to_date():
    module = runpy.run_path(str(ROOT / "csrc" / "generate_arguments.py"))
    assert module["HEADER"].read_text() == module["header"](), "run: python csrc/generate_arguments.py"


def test_table_in_the_docs_is_up_to_date():
    rows = [
        (f"`{option.name}`", option.value, f"`{option.default!r}`", option.doc, "yes" if option.gradient else "no")
        for option in OPTIONS
    ]
    lines = ["| option | value | default | effect | gradient |", "|---|---|---|---|---|"]
    table = "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
    assert table in (ROOT / "docs" / "numerics.md").read_text(), table


def test_every_option_has_a_variant_in_the_tests():
    used = {name for variant in VARIANTS.values() for name in variant.options}
    assert used == ALL - {"seed", "casting"}
