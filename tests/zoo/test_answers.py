from addnorm import wirings
from zoo.packages import load


def test_answers_state_code_and_streams():
    names = {row.name for row in wirings.list_all()} | {None}
    for package in load().values():
        assert all("==" in requirement for requirement in package.requirements), package.name
        assert len({model.name for model in package.models}) == len(package.models) > 0, package.name
        for model in package.models:
            answer = model.answer
            assert len(model.code) > 40, model.name
            assert bool(answer.streams) != bool(answer.reason), model.name
            for stream in (*answer.streams, *answer.also):
                assert stream.sites, model.name
                assert stream.names <= names, model.name
                has_rows = any(site.row is not ... for site in stream.sites)
                assert has_rows or stream.names != {None} or package.installed, model.name
