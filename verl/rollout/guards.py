"""Models that say whether a response may stay, and the names that settings call guards by."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property, partial
from typing import Any, TypeVar

from verl._base.checked import checked
from verl._base.names import check_known
from verl._base.record import Count, Strings
from verl._host.device import put
from verl.data.chat import ChatTokenizer
from verl.data.prompts import content_text
from verl.data.text import ResponseText, behind_thoughts
from verl.data.tokenize import encode_plain
from verl.errors import ConfigError, ModelError, shown

_T = TypeVar("_T", bound=Callable[..., Any])
_GUARDS: dict[str, Callable[..., Any]] = {}
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
#: What a guard model without a chat template is asked.
TEMPLATE = """Does the response state only what is true and harmless? Answer safe or unsafe.

[Prompt]
{prompt}

[Response]
{response}

Answer:"""


def register_guard(name: str) -> Callable[[_T], _T]:
    """Give a class or function a name that `constraint_model` of a task may say.

    Called with the options of `constraint_config` it returns a `Guard`, which reads responses while they are written,
    or `accept(text, row)`, plain or async, which judges those that are finished.
    """

    def register(guard: _T) -> _T:
        _GUARDS[name] = guard
        return guard

    return register


def make_guard(name: str, **options: Any) -> Any:
    """A registered guard.

    Raises:
        ConfigError: the name is unknown, or the guard does not take these options.
    """
    check_known("no guard is called", [name], _GUARDS, hint="; or give FILE.py:NAME")
    try:
        return _GUARDS[name](**options)
    except TypeError as error:
        raise ConfigError(f"guard '{name}': {error}") from error


@register_guard("fact_checker")
@register_guard("guard_model")
@checked
@dataclass(eq=False)
class GuardModel:
    """Judges finished responses by a model: one that writes a verdict, as Llama Guard does, or a sequence classifier
    with one label.

    The first is given the conversation through its own chat template (without one, `template`) and decodes greedily;
    its verdict is bad if it begins with the words of an entry of `refuses`, whatever their case and the marks around
    them. It is loaded where responses are sampled, when the first of them is finished.

    Args:
        model_name: directory or name.
        max_new_tokens: of the verdict.
        template: what the model is asked, with {prompt} and {response}; None: see above.
        refuses: what a bad verdict begins with: whole words, one or several an entry.
        minimum: the lowest score of a classifier that passes.
        device: where the model runs; None: the accelerator where there is one.
        dtype: as of `load_model`, "int4" among them.

    Raises:
        ConfigError: the template has no {response}; `max_new_tokens` is below 1; an entry of `refuses` has no word;
            there is no such device.
    """

    model_name: str
    _: KW_ONLY
    max_new_tokens: Count = 8
    template: str | None = None
    refuses: Strings = ("unsafe", "false", "no", "incorrect")
    minimum: float = 0.0
    device: str | None = None
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.template is not None and "{response}" not in self.template:
            raise ConfigError("the template of a guard model must contain {response}")
        #: The words of each entry in lower case; "no-one" and "isn't" are one word each.
        self._bad = [_WORD.findall(entry.casefold()) for entry in self.refuses]
        if not self._bad or not all(self._bad):
            raise ConfigError(f"refuses of a guard model are words, such as 'unsafe', not {shown(self.refuses)}")
        self._one_at_a_time = threading.Lock()

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """By the settings alone: the model is loaded in the process that uses it."""
        return partial(type(self), **{field.name: getattr(self, field.name) for field in fields(self)}), ()

    async def __call__(self, text: str, row: Mapping[str, Any]) -> bool:
        """Whether the response may stay."""
        chat, prompt = row.get("messages"), str(row.get("prompt") or "")
        if chat:
            prompt = content_text((json.loads(chat) if isinstance(chat, str) else chat)[-1])
        return await asyncio.to_thread(self.judge, prompt, text)

    def judge(self, prompt: str, response: str) -> bool:
        """The same for synchronous code.

        Raises:
            ModelError: the model cannot be loaded.
        """
        import torch

        from verl.models.loading import eos_token_ids

        with self._one_at_a_time, torch.inference_mode():
            model, tokenizer, is_classifier = self._loaded
            tokens = torch.tensor([self._question(tokenizer, prompt, response, is_classifier)], device=model.device)
            if is_classifier:
                return bool(model(tokens).logits.float().reshape(-1)[0] >= self.minimum)
            options = {"max_new_tokens": self.max_new_tokens, "do_sample": False}
            output = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
            read = ResponseText(tokenizer, eos_token_ids(model, tokenizer))
            return self.accepts(read(output[0, tokens.shape[1] :].tolist()))

    def accepts(self, verdict: str) -> bool:
        """Whether a verdict in words, behind the thoughts of a model that thinks, is a good one. None is not."""
        said = _WORD.findall(behind_thoughts(verdict).partition("<think>")[0].casefold())
        return bool(said) and not any(said[: len(bad)] == bad for bad in self._bad)

    @cached_property
    def _loaded(self) -> tuple[Any, Any, bool]:
        from transformers import AutoConfig

        from verl.models.loading import load_model, load_tokenizer

        try:
            tokenizer = load_tokenizer(self.model_name)
            names = getattr(AutoConfig.from_pretrained(self.model_name), "architectures", None) or ()
            is_classifier = any(name.endswith("ForSequenceClassification") for name in names)
            model = load_model(self.model_name, dtype=self.dtype, kind="classifier" if is_classifier else "causal")
        except (ModelError, OSError, ValueError) as error:  # OSError and ValueError: of a configuration
            raise ModelError(f"guard model, model_name={self.model_name!r}: {error}") from error
        return put(model, self.device), tokenizer, is_classifier

    def _question(self, tokenizer: Any, prompt: str, response: str, closed: bool) -> list[int]:
        """Tokens of the question; `closed`: with the EOS that the tokenizer appends to every text, after which nothing
        can be written."""
        chat = ChatTokenizer(tokenizer)
        if self.template is None and getattr(tokenizer, "chat_template", None):
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            return chat.encode(chat.render(turns, begun=False))
        parts = {"{prompt}": prompt, "{response}": response}  # neither may stand for the other
        text = re.sub(r"\{prompt\}|\{response\}", lambda match: parts[match[0]], self.template or TEMPLATE)
        return encode_plain(chat, text, closed=closed)
