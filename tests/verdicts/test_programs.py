"""The corpus of programs: each verdict is the right one."""

from __future__ import annotations

import pytest

from tests.verdicts.programs import CASES, Case, judged

FORMS = sorted({case.form for case in CASES})


def test_each_form_has_right_programs_and_wrong_ones() -> None:
    values = {form: {case.value for case in CASES if case.form == form} for form in FORMS}
    assert len(CASES) >= 200
    assert values.pop("tests at fault") == {None}
    assert all(kinds == {0.0, 1.0} for kinds in values.values()), values


def test_no_case_is_there_twice() -> None:
    assert len({(str(case.tests), case.program) for case in CASES}) == len(CASES)


def check(cases: list[Case]) -> None:
    rewards, reasons = judged(cases, timeout=10.0, live=True)
    verdicts = zip(cases, rewards, reasons, strict=True)
    assert not [(case.reason, reward, why) for case, reward, why in verdicts if reward != case.value]


def test_one_verdict_in_twenty() -> None:
    check(CASES[::20])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_each_verdict_is_the_right_one(form: str) -> None:
    check([case for case in CASES if case.form == form])
