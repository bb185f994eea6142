import os
import threading
import time
from collections.abc import Callable

import pytest

from tests.conftest import byte_tokenizer
from verl.data import chat
from verl.data.chat import ChatTokenizer
from verl.data.time_limit import time_limit
from verl.errors import DataError

LOOP = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
SAY = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


def spin() -> None:
    while True:
        pass


def swallow() -> None:
    while True:
        try:
            spin()
        except Exception:
            return


def test_code_that_is_late_is_ended_and_nothing_comes_after_it() -> None:
    for action in (spin, swallow):
        began = time.monotonic()
        try:
            with time_limit(0.3):
                action()
            assert action is swallow
        except TimeoutError:
            assert action is spin
        assert time.monotonic() - began < 3
    with time_limit(5), pytest.raises(ZeroDivisionError):
        1 / 0  # noqa: B018
    end = time.monotonic() + 0.6
    while time.monotonic() < end:  # an exception that was still on its way would end this
        pass


def test_code_that_ends_at_the_limit_leaves_nothing_behind() -> None:
    results = []

    def at_the_limit() -> None:
        for extra in (-0.01, 0.0, 0.01, 0.25, 0.3):
            try:
                with time_limit(0.2):
                    time.sleep(0.2 + extra)
                results.append("in time")
            except TimeoutError:
                results.append("late")
        time.sleep(0.6)
        results.append("done")

    threads = [threading.Thread(target=at_the_limit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count("done") == 8 and len(results) == 48


def test_a_forked_process_has_a_limit_too() -> None:
    with time_limit(5):
        pass
    pid = os.fork()
    if not pid:
        try:
            with time_limit(0.2):
                spin()
        except TimeoutError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.parametrize(
    ("template", "ask"),
    [
        (LOOP + SAY, lambda c: c.render([{"role": "user", "content": "a"}])),
        (LOOP + SAY, lambda c: c.ends),
        (
            "{% if 'loop' in messages[0].content %}" + LOOP + "{% endif %}" + SAY,
            lambda c: c.render([{"role": "user", "content": "loop"}]),
        ),
    ],
)  # fmt: skip
def test_a_chat_template_that_loops_is_refused(
    monkeypatch: pytest.MonkeyPatch, template: str, ask: Callable[[ChatTokenizer], object]
) -> None:
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.3)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    began = time.monotonic()
    with pytest.raises(DataError, match=r"the chat template cannot render .* it takes more than 0.3 s"):
        ask(ChatTokenizer(tokenizer))
    assert time.monotonic() - began < 5
