"""The corpus of programs: its size, and that each form has right programs and wrong ones."""

from __future__ import annotations

from tests.verdicts.programs import CASES


def test_each_form_has_right_programs_and_wrong_ones() -> None:
    values = {form: {case.value for case in CASES if case.form == form} for form in {case.form for case in CASES}}
    assert len(CASES) >= 200
    assert values.pop("tests at fault") == {None}
    assert all(kinds == {0.0, 1.0} for kinds in values.values()), values


def test_no_case_is_there_twice() -> None:
    assert len({(str(case.tests), case.program) for case in CASES}) == len(CASES)
