"""TRL's data: its tokens of each form of rows, its order of rows, and its last batch of an epoch."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, ClassVar

import torch

from verl.data.chat import ChatTokenizer, template_inputs
from verl.data.cursor import Cursor
from verl.data.offline import OfflineDatasetLoader
from verl.data.tokenize import Encoded, encode_row
from verl.errors import DataError

logger = logging.getLogger(__name__)

#: Rows that `datasets.map` works on at once, in which TRL puts the chosen responses of pairs before the rejected ones.
_UNPAIRED = 1000
#: transformers' label of a token that is not trained.
_UNTRAINED = -100


class EpochCursor(Cursor):
    """Ends a batch where an epoch ends; rows are shuffled as transformers' sampler does under Accelerate."""

    def take(self, count: int) -> list[tuple[int, int]]:
        return super().take(min(count, self.size - self.position))

    def permutation(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return [*torch.randperm(self.size, generator=generator).tolist()]


class TRLLoader(OfflineDatasetLoader):
    """Rows as TRL's trainers tokenise them: prompt and reply as one text or chat, up to its end, of which the reply is
    what the tokens of the prompt alone do not begin.

    Args:
        args: the trainer's. `max_length` None: nothing is cut.
        batch_size: rows of a step, or pairs.
    """

    cursor: ClassVar[type[Cursor]] = EpochCursor
    #: Whether rows lose what is behind `max_length`.
    cuts: ClassVar[bool] = True
    #: Whether all that the reader gives is trained, its prompt too; whether both responses of a pair begin behind the
    #: same tokens.
    whole = False
    shares_prompts: ClassVar[bool] = False
    #: With TRL they count in the loss; and rows that are tokens are cut as others are.
    refuses_equal_pairs: ClassVar[bool] = False
    keeps_tokens: ClassVar[bool] = False

    def __init__(self, rows: Any, tokenizer: Any, args: Any, batch_size: int) -> None:
        self.args = args
        self.limit: int | None = args.max_length if self.cuts else None
        self.keeps_end = args.truncation_mode == "keep_end"
        super().__init__(
            tokenized(rows),
            tokenizer,
            batch_size=batch_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy == "random" or getattr(args, "shuffle_dataset", False),
            max_length=self.limit,
        )

    def _encoded(self, chat: ChatTokenizer) -> list[Encoded]:
        if self.kind == "experience":
            names = ("prompt_tokens", "response_tokens", "response_mask")
            return [self._cut(row) for row in zip(*map(self._rows.__getitem__, names), strict=True)]
        if getattr(self.args, "assistant_only_loss", False):
            return list(map(self._cut, super()._encoded(chat)))
        reasons, rows = [], []
        for row in self._rows.rows():
            prompt, tokens = self._pair(chat, row)
            same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, tokens, strict=False))
            rows.append((tokens, 0 if self.whole else sum(1 for _ in same)))
            try:  # this package's own loaders refuse replies that the template of a chat writes so
                if row.get("messages") is not None:
                    encode_row(chat, row)
            except DataError as error:
                reasons.append(f"row {row['group']}: {error}")
        if reasons:
            logger.warning(
                "%s: %d of %d replies do not end with a token that stops generation, or do not stand behind "
                "their prompt as the chat template writes it; they are trained as TRL trains them (%s)",
                self.name,
                len(reasons),
                len(self._rows),
                reasons[0],
            )
        for pair in self._rows.group_indices() if self.shares_prompts else ():
            least = min(rows[index][1] for index in pair)
            for index in pair:
                rows[index] = rows[index][0], least
        return [self._cut((ids[:split], ids[split:], [1] * (len(ids) - split))) for ids, split in rows]

    def _pair(self, chat: ChatTokenizer, row: Any) -> tuple[list[int], list[int]]:
        """Tokens of the prompt alone, and of prompt and reply."""
        if row.get("messages") is not None:
            messages, inputs = json.loads(row["messages"]), template_inputs(row)
            said = {"role": "assistant", "content": row["response"]}
            reply = said if row.get("reply") is None else json.loads(row["reply"])
            turns = json.loads(row["turns"]) if row.get("turns") else [reply]
            prompt = chat.render(messages, inputs)
            return chat.encode(prompt), chat.encode(chat.render([*messages, *turns], inputs, reply=False))
        end = chat.tokenizer.eos_token
        if end is None:
            raise DataError("the tokenizer has no eos_token, so that nothing ends a response: set tokenizer.eos_token")
        prompt, reply = row.get("prompt") or "", row["response"]
        text = prompt + reply if reply.endswith(end) else prompt + reply + end
        return tuple(list(chat.tokenizer(part)["input_ids"]) for part in (prompt, text))  # type: ignore[return-value]

    def _cut(self, row: Encoded) -> Encoded:
        """Without the beginning, if the end is kept; and with a first token, which nothing predicts, as a prompt."""
        prompt, reply, mask = row
        if self.keeps_end and self.args.max_length is not None:
            over = max(0, len(prompt) + len(reply) - self.args.max_length)
            lost = max(0, over - len(prompt))
            prompt, reply, mask = prompt[over:], reply[lost:], mask[lost:]
        return (prompt, reply, mask) if prompt else (reply[:1], reply[1:], mask[1:])

    def columns(self) -> dict[str, list[Any]]:
        """Tokens of each row, or pair, by TRL's names."""
        both = zip(self.batch["prompt_tokens"], self.batch["response_tokens"], strict=True)
        return {"input_ids": [prompt + reply for prompt, reply in both]}


def tokenized(rows: Any) -> Any:
    """Rows in TRL's columns of tokens as prompts and responses; others as they are."""
    first: Mapping[str, Any] = next(iter(rows), {})
    old = {"chosen_input_ids": "chosen_ids", "rejected_input_ids": "rejected_ids"}
    if any(name in first for name in old):
        warnings.warn(
            f"{' and '.join(old)} will not be supported in v1.0: name them {[*old.values()]}", FutureWarning, 3
        )
        rows = [{old.get(name, name): value for name, value in row.items()} for row in rows]
        first = rows[0]
    if not {"input_ids", "chosen_ids", "completion_ids"} & set(first):
        return rows
    groups = [_parts_of_tokens(row, str(number)) for number, row in enumerate(rows)]
    return [part for parts in groups if all(part["response_tokens"] for part in parts) for part in parts]


def _parts_of_tokens(row: Mapping[str, Any], group: str) -> list[dict[str, Any]]:
    if "input_ids" in row:
        tokens = list(row["input_ids"])
        masks = [row[name] for name in ("completion_mask", "assistant_masks") if row.get(name) is not None]
        trained = [int(all(each)) for each in zip(*masks, strict=True)] if masks else [1] * len(tokens)
        if row.get("labels") is not None:
            trained = [int(label != _UNTRAINED) for label in row["labels"]]
        return [{"group": group, "prompt_tokens": [], "response_tokens": tokens, "response_mask": trained}]
    shared = {"group": group, "prompt_tokens": list(row.get("prompt_ids") or [])}
    labels = {"chosen_ids": 1.0, "rejected_ids": 0.0} if "chosen_ids" in row else {"completion_ids": row.get("label")}
    return [
        {
            "id": f"{group}/{name}",
            **shared,
            "response_tokens": list(row[name]),
            "response_mask": [1] * len(row[name]),
            **({} if label is None else {"label": float(label)}),
        }
        for name, label in labels.items()
    ]


class TokenRows(Sequence[Any]):
    """A data set as TRL's trainers hold it: the tokens of each row, or pair, by column."""

    def __init__(self, loader: TRLLoader) -> None:
        self.loader = loader
        self._columns = loader.columns()
        self.column_names = list(self._columns)

    def __len__(self) -> int:
        return len(self._columns[self.column_names[0]])

    def __getitem__(self, key: Any) -> Any:
        """A row by number, or a column by name."""
        if isinstance(key, str):
            return self._columns[key]
        return {name: values[key] for name, values in self._columns.items()}


class TextLoader(TRLLoader):
    """Of `SFTTrainer`: a completion behind its prompt is trained; of texts and chats all is, or what the assistant
    says."""

    def __init__(self, rows: Any, tokenizer: Any, args: Any, batch_size: int) -> None:
        paired = {"prompt", "completion"} <= set(next(iter(rows), {}))
        self.whole = not paired or args.completion_only_loss is False
        super().__init__(rows, tokenizer, args, batch_size)

    def tokenize(self, tokenizer: Any) -> None:
        """Without rows of which no token is trained."""
        super().tokenize(tokenizer)
        self._begin(self.batch.filter([any(mask) for mask in self.batch["response_mask"]]))
        if not len(self.batch):
            raise DataError(f"{self.name}: within max_length={self.args.max_length} no token of any row is trained")

    def columns(self) -> dict[str, list[Any]]:
        """The first token has its label, too, though nothing predicts it."""
        ids, counts = super().columns()["input_ids"], self.whole and not self.args.assistant_only_loss
        masks = self._rows["response_mask"] if self.kind == "experience" else [[counts]] * len(self._rows)
        firsts = {group: mask[0] for group, mask in zip(self._rows["group"], masks, strict=True)}
        labels = []
        for row, tokens in zip(self.batch.rows(), ids, strict=True):
            first = firsts[row["group"]] and not self.keeps_end
            trained = [first, *[0] * (len(row["prompt_tokens"]) - 1), *row["response_mask"]]
            labels.append([token if bit else _UNTRAINED for token, bit in zip(tokens, trained, strict=True)])
        return {"input_ids": ids, "labels": labels}


class PairLoader(TRLLoader):
    """Of `DPOTrainer`: both responses of a pair begin behind the same tokens."""

    shares_prompts = True

    def columns(self) -> dict[str, list[Any]]:
        chosen, rejected = map(self.batch.take, zip(*self.batch.group_indices(), strict=True))
        replies = {"chosen_ids": chosen["response_tokens"], "rejected_ids": rejected["response_tokens"]}
        return {"prompt_ids": chosen["prompt_tokens"], **replies}


class ScoredLoader(TRLLoader):
    """Of `RewardTrainer`: pairs of which one is longer than `max_length` are left out. transformers reads the score at
    the last token that is no padding, so that an end which is the padding token, too, is left out."""

    cuts = False

    def tokenize(self, tokenizer: Any) -> None:
        super().tokenize(tokenizer)
        limit, padding = self.args.max_length, getattr(tokenizer, "pad_token_id", None)
        lengths = zip(*map(self.batch.lengths, ("prompt_tokens", "response_tokens")), strict=True)
        groups = self.batch["group"]
        long = {group for group, both in zip(groups, lengths, strict=True) if limit is not None and sum(both) > limit}
        self.counts["dropped"] += len(long)
        #: Whether a reply is scored at the EOS behind it.
        self.at_eos = "messages" not in self.batch and tokenizer.eos_token_id != padding
        kept = self.batch.filter([group not in long for group in groups])
        if not len(kept):
            raise DataError(f"every pair has a response that ends behind max_length={limit} tokens; none is left")
        replies = [ids[:-1] if ids[-1:] == [padding] and len(ids) > 1 else ids for ids in kept["response_tokens"]]
        cut = {"response_tokens": replies, "response_mask": [[1] * len(ids) for ids in replies]}
        self._begin(kept.drop(cut).add(cut))

    def columns(self) -> dict[str, list[Any]]:
        whole = super().columns()["input_ids"]
        chosen, rejected = zip(*self.batch.group_indices(), strict=True)
        return {"chosen_ids": [whole[row] for row in chosen], "rejected_ids": [whole[row] for row in rejected]}


class LabelledLoader(TRLLoader):
    """Of `KTOTrainer`: rows with a label, each with the response of the row before it, round a micro-batch of the data
    as they come, for the KL (`kl_response_tokens`)."""

    def tokenize(self, tokenizer: Any) -> None:
        super().tokenize(tokenizer)
        if self.kind == "pairs":
            order = [
                row
                for start in range(0, len(self.batch), 2 * _UNPAIRED)
                for first in (0, 1)
                for row in range(start + first, min(start + 2 * _UNPAIRED, len(self.batch)), 2)
            ]
            rows = self.batch.take(order)
            self.batch = rows.drop(["group"]).add({"group": rows["id"]})
        replies, prompts = self.batch["response_tokens"], self.batch.lengths("prompt_tokens")
        each, limit = self.args.per_device_train_batch_size, self.args.max_length
        parts = [replies[start : start + each] for start in range(0, len(replies), each)]
        others = [reply for part in parts for reply in (*part[-1:], *part[:-1])]
        cut = [ids if limit is None else ids[: limit - prompt] for ids, prompt in zip(others, prompts, strict=True)]
        self._begin(self.batch.add({"kl_response_tokens": cut}))

    def columns(self) -> dict[str, list[Any]]:
        names = {"prompt_ids": "prompt_tokens", "completion_ids": "response_tokens", "label": "label"}
        return {theirs: self.batch[ours] for theirs, ours in names.items()}
