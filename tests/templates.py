"""Small tokenizers with chat templates of the shapes that known families of models have, written anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = ["Two plus two is four. Why is the sky blue? A sum of six and one.\n\nIt is four, it is blue."]


def byte_level(special: list[str], *, begin: str | None = None, end: str | None = None, **names: Any) -> Any:
    """A byte-level tokenizer with merges. It puts `begin` before each text, and `end` behind it."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TEXT * 20,
        trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    around = [name for name in (begin, "$A", end) if name]
    if len(around) > 1:
        ids = [(name, core.token_to_id(name)) for name in around if name != "$A"]
        core.post_processor = processors.TemplateProcessing(single=" ".join(around), special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def spaced(special: list[str], *, begin: str | None = None, scheme: str = "first", **names: Any) -> Any:
    """As of SentencePiece: a space is a letter of its token, the first token of a text has one that is not written, and
    what has no token is bytes. `scheme` "always": so has the first token behind each special one."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    core.train_from_iterator(
        [word for line in TEXT for word in line.split()] + [f"▁{word}" for line in TEXT for word in line.split()] * 5,
        trainers.BpeTrainer(
            vocab_size=460,
            special_tokens=["<unk>", *special, *bytes_],
            initial_alphabet=[*map(chr, range(33, 127)), "▁"],
            show_progress=False,
        ),
    )
    if begin:
        ids = [(begin, core.token_to_id(begin))]
        core.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=ids)
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **names)
    return made


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ bos_token }}<<SYS>>{{ m.content }}<</SYS>>"
    "{% elif m.role == 'user' %}{{ bos_token }}[INST] {{ m.content.strip() }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content.strip() }} {{ eos_token }}"
    "{% else %}{{ raise_exception('roles are system, user and assistant') }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}"
    "{% if tools %}<|start_header_id|>tools<|end_header_id|>\n\n{{ tools | tojson }}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{{ '<|eom_id|>' if tools else '<|eot_id|>' }}"
    "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_CALLS = "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
QWEN25 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.{{ tools | tojson if tools else '' }}<|im_end|>\n"
    "{% elif tools %}<|im_start|>system\n{{ messages[0].content }}{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% elif not (m.role == 'system' and tools) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    + _CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set parts = (m.content or '').split('</think>') %}"
    "{% set thought = m.reasoning_content or (parts[0].split('<think>')[-1] if parts | length > 1 else '') %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought.strip() }}\n</think>\n\n{% endif %}{{ parts[-1].strip() }}"
    + _CALLS
    + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
#: The prompt opens the thought that a finished chat does not have.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% elif m.role == 'user' %}<|User|>{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
#: The prompt does not; thoughts are left out all the same.
R1_PLAIN = R1.replace("<think>\n{% endif %}", "{% endif %}")
#: Prompt and finished chat both open it.
QWQ = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('there is no system') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if loop.index0 == ns.last and tools %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' and m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{{ eos_token }}"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}[SYS]{{ m.content }}[/SYS]{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)

_IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_S = ["<s>", "</s>"]
_L3 = ["<|begin|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>"]
_R1 = ["<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>"]


@dataclass(frozen=True)
class Family:
    """How a family's tokenizer is made.

    Attributes:
        last: the token that a trained reply ends with.
    """

    template: str | None
    special: tuple[str, ...]
    last: str
    eos: str
    bos: str | None = None
    spaced: bool = False

    def make(self) -> Any:
        make = spaced if self.spaced else byte_level
        tokenizer = make(list(self.special), begin=self.bos, eos_token=self.eos, bos_token=self.bos, pad_token=self.eos)
        tokenizer.chat_template = self.template
        return tokenizer


FAMILIES = {
    "llama2": Family(LLAMA2, (*_S,), "</s>", "</s>", "<s>", spaced=True),
    "llama3": Family(LLAMA3, (*_L3,), "<|eot_id|>", "<|eot_id|>", "<|begin|>"),
    "qwen2.5": Family(QWEN25, (*_IM,), "<|im_end|>", "<|im_end|>"),
    "qwen3": Family(QWEN3, (*_IM, "<think>", "</think>"), "<|im_end|>", "<|im_end|>"),
    "r1": Family(R1, (*_R1, "<think>", "</think>"), "<|end|>", "<|end|>", "<|begin|>"),
    "r1 plain": Family(R1_PLAIN, (*_R1,), "<|end|>", "<|end|>", "<|begin|>"),
    "qwq": Family(QWQ, (*_IM, "<think>", "</think>"), "<|im_end|>", "<|im_end|>"),
    "gemma": Family(
        GEMMA, ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", "<eos>", "<bos>", spaced=True
    ),
    "mistral": Family(MISTRAL, (*_S, "[INST]", "[/INST]"), "</s>", "</s>", "<s>", spaced=True),
    "phi": Family(
        PHI,
        ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
        "<|end|>",
        "<|endoftext|>",
        spaced=True,
    ),
    "chatml": Family(CHATML, (*_IM,), "<|im_end|>", "<|im_end|>"),
    "chatml of a base model": Family(CHATML, (*_IM,), "<|im_end|>", "<|endoftext|>"),
    "none": Family(None, (*_S,), "</s>", "</s>", "<s>"),
}

DEEPSEEK = (
    "{{ bos_token }}{% if tools %}## Tools\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}{{ eos_token }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
#: As of version 3.1: no fence, no word before the name.
DEEPSEEK31 = DEEPSEEK.replace(
    "function<｜tool▁sep｜>{{ c.function.name }}\n```json\n", "{{ c.function.name }}<｜tool▁sep｜>"
)
DEEPSEEK31 = DEEPSEEK31.replace("\n```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>")
GPT_OSS = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% if m.thinking and m.tool_calls %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{ c.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% elif m.role == 'tool' %}"
    "<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
QWEN_XML = QWEN25.replace(
    _CALLS,
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}",
)
MISTRAL11 = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments }}{% endfor %}"
    "{{ eos_token }}{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
_DS = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
_HARMONY = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"]
#: Further families, for what calls of tools look like.
TOOL_FAMILIES = {
    **{name: FAMILIES[name] for name in ("llama3", "qwen2.5", "qwen3", "mistral")},
    "qwen xml": Family(QWEN_XML, (*_IM,), "<|im_end|>", "<|im_end|>"),
    "mistral 11": Family(MISTRAL11, (*_S, "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"), "</s>", "</s>", "<s>"),
    "deepseek": Family(DEEPSEEK, (*_DS,), _DS[1], _DS[1], _DS[0]),
    "deepseek 3.1": Family(DEEPSEEK31, (*_DS,), _DS[1], _DS[1], _DS[0]),
    "gpt-oss": Family(GPT_OSS, (*_HARMONY,), "<|return|>", "<|return|>"),
}
