from addnorm import wirings
from zoo.answer import KINDS
from zoo.packages import load


def test_answers_cover_seventy_models_of_ten_packages():
    packages = load()
    assert len(packages) >= 10
    assert sum(len(package.models) for package in packages.values()) >= 70


def test_answers_state_code_and_streams():
    names = {row.name for row in wirings.list_all()} | {None}
    for package in load().values():
        assert all("==" in requirement for requirement in package.requirements), package.name
        assert len({model.name for model in package.models}) == len(package.models), package.name
        for model in package.models:
            assert len(model.code) > 40, model.name
            assert bool(model.streams) != bool(model.refuse), model.name
            for stream in (*model.streams, *model.also):
                assert set(stream.letters) <= {*KINDS, "?"}, model.name
                assert set(stream.names) <= names, model.name
                assert len(stream.expected_rows()) in (0, len(stream.letters)), model.name
                assert stream.expected_rows() or stream.names != (None,), model.name
