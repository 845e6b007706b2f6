"""The problems and remarks of `tests/data/config_cases.txt`, line by line."""

import pytest
from config_cases import read_cases

CASES = read_cases()


@pytest.mark.parametrize("case", CASES, ids=[f"{case.title}: {case.text}" for case in CASES])
def test_every_case_gets_its_answer(case):
    assert case.ask() == case.answer


def test_every_problem_names_a_key_and_a_remedy():
    for case in CASES:
        assert all(": " in line for line in case.answer), case.text
        assert all("; " in line for line in case.answer if not line.startswith("remark: "))
