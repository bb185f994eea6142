import time
from collections.abc import Callable

import pytest

from tests.conftest import byte_tokenizer
from verl.data import chat
from verl.data.chat import ChatTokenizer
from verl.errors import DataError

#: Seconds, not for ever: the thread goes on.
LOOP = "{% for a in range(10000) %}{% for b in range(3000) %}{% endfor %}{% endfor %}"
SAY = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


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
    with pytest.raises(DataError, match=r"the chat template cannot render .* took longer than 0.3 s"):
        ask(ChatTokenizer(tokenizer))
    assert time.monotonic() - began < 5
