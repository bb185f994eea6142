"""A micro-batch as flat tokens, and causal attention over them.

Rows of one group share one forward of what they begin with (`prefix_tree`): it stands in the flat row once, what
follows in each of them behind it. Where flash attention takes rows of different lengths it gets them as they are;
elsewhere rows of nearly equal size are put into buckets, whatever they follow. A T x T mask never exists.

On CPU attention over buckets is written out in matrix products: torch's flash kernel for CPU is several times slower at
the lengths of training rows, above all in the backward. What stands between the products (gathering heads, softmax,
scattering) is compiled where it can be. Query heads are folded onto their key/value head, so keys are never
repeated for heads; scores exist for one piece of bounded size at a time and are computed again in the backward, so
nothing is kept but query, key and value. The softmax is fp32 (fp64 for fp64). Elsewhere each bucket is one call
of SDPA.

Shapes: T flat tokens, S samples, R response tokens of all samples, B rows of a bucket, L the longest row, P length of
the longest prefix, M >= P + L keys, C queries of a piece, H query heads, K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import and_, eq
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from verl._base.autograd import add_rows
from verl._host.device import is_host, to_device
from verl.attention import flash
from verl.attention.prefix_tree import Indices, PrefixTree, families, joined, prefix_tree
from verl.attention.varlen import Ragged, varlen_attend
from verl.errors import DataError
from verl.kernels.compiled import VECTOR, layer_kernels

# A bucket may hold this many padded scores for each real one before a new bucket is opened.
_WASTE = 1.5
# Scores of one piece on CPU, for one head: the passes over those of all heads should stay in the cache.
PIECE = 1 << 16
_NO_WINDOW = 1 << 40


@dataclass(frozen=True)
class Packed:
    """One training micro-batch as flat tokens."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    context: Segments
    predict: Tensor  # [R] index into [T] of the hidden state that predicts each response token, rows in order
    targets: Tensor  # [R] the response tokens
    last: Tensor  # [S] index into [T] of the last token of each row that was fed
    # From numbers read at `predict` or `last` to those of all rows, where they are of some tokens, or a rank's slice.
    gather: Callable[[Tensor], Tensor] = lambda values: values

    def predicting(self, mask: Tensor) -> Packed:
        """Predictions of the response tokens alone that the mask `[R]` has; those of the others are 0."""
        count, index = len(mask), to_device(mask.nonzero()[:, 0], self.targets.device)
        if len(index) == count:
            return self
        return replace(
            self,
            predict=self.predict[index],
            targets=self.targets[index],
            gather=lambda values: values.new_zeros(count).index_copy(0, index, values),
        )


@dataclass(frozen=True)
class PaddedRows:
    """The same tokens as one right-padded row a sample, shared prompts repeated."""

    source: Tensor  # [S, L] index into [T]; padding repeats the row's first token
    mask: Tensor  # [S, L] True on real tokens
    copy_index: Tensor  # [T] index into [S * L] of one copy of each flat token


@dataclass(frozen=True)
class Row:
    """Tokens `start` to `start + length` of the flat row, causal; they also see all of their parent's, and what those
    see: as the tokens of a response see the prompt."""

    start: int
    length: int
    parent: Row | None = None

    @property
    def prefix(self) -> Indices:
        """Where the tokens before it lie in the flat row, from the first on."""
        return np.arange(0) if self.parent is None else self.parent.path

    @cached_property
    def path(self) -> Indices:
        """Where the tokens before it and its tokens lie."""
        return np.concatenate([self.prefix, np.arange(self.start, self.start + self.length)])


def pack_rows(
    prompts: Sequence[Sequence[int] | None],
    responses: Sequence[Sequence[int] | None],
    device: torch.device | str = "cpu",
    share_prompts: bool = True,
    keep_last: bool = False,
    tree: PrefixTree | None = None,
) -> Packed:
    """Lay prompts and responses, one of each a sample, out as flat tokens.

    Args:
        share_prompts: adjacent samples with equal prompts share one forward of what they begin with, and so do prompts
            that begin alike for `prefix_tree.LEAST_BETWEEN` tokens, `LEAST_BETWEEN_ON_DEVICE` on an accelerator. The
            numbers do not change.
        keep_last: feed the last response token too. Nothing is predicted from it, so it is left out by
            default; scores at the last token need it.
        tree: of the samples without their last response token, in the place of one by their prompts: what adjacent
            samples have in common there is computed once.

    Raises:
        DataError: a row has an empty prompt (no state would predict its first token), or there are no rows.
    """
    samples = [(list(p or ()), list(r or ())) for p, r in zip(prompts, responses, strict=True)]
    if not samples:
        raise DataError("a batch without rows cannot be packed: drop empty micro-batches before the forward")
    if empty := [number for number, (prompt, _) in enumerate(samples) if not prompt]:
        raise DataError(f"row {empty[0]} has an empty prompt_tokens: give every prompt at least one token (a BOS)")
    lengths = [len(prompt) for prompt, _ in samples]
    fed = [np.array(p + r[:-1], dtype=np.int64) for p, r in samples]
    if tree is None:
        of_prompt = families([row[:length] for row, length in zip(fed, lengths, strict=True)])
        tree = prefix_tree(fed, lengths, of_prompt if share_prompts else range(len(fed)))
    if share_prompts:
        tree = joined(tree, fed, on_device=not is_host(torch.device(device)))
    if keep_last:
        fed = [np.append(row, r[-1:]).astype(np.int64) for row, (_, r) in zip(fed, samples, strict=True)]
        ends = enumerate(zip(tree.paths, samples, strict=True), len(tree.lengths))
        paths = [(*path, number) if r else path for number, (path, (_, r)) in ends]
        tree = PrefixTree([*tree.lengths, *[1] * len(fed)], paths)
    rows, places = _layout(tree, list(map(len, fed)))
    tokens, positions = np.empty((2, sum(row.length for row in rows)), dtype=np.int64)
    for index, row in zip(places, fed, strict=True):
        tokens[index], positions[index] = row, np.arange(len(row))
    # The last token of a prompt predicts the first of the response, which predicts the second, and so on.
    predict = [index[length - 1 :][: len(r)] for index, length, (_, r) in zip(places, lengths, samples, strict=True)]
    targets = [token for _, response in samples for token in response]
    device = torch.device(device)
    flat = (tokens, positions, np.concatenate(predict), targets, [index[-1] for index in places])
    tokens_T, positions_T, predict_R, targets_R, last_S = (
        to_device(torch.from_numpy(np.asarray(values, dtype=np.int64)), device) for values in flat
    )
    return Packed(tokens_T, positions_T, Segments(rows, places, device), predict_R, targets_R, last_S)


def _layout(tree: PrefixTree, sizes: Sequence[int]) -> tuple[list[Row], list[Indices]]:
    """The rows to attend, in the order of the flat row, and where the tokens of each sample lie, `sizes` of them."""
    # Nodes depth first, 0 above all. A sample has those of the one before it as far as they are the same, then others.
    parents, lengths, paths = [0], [0], [[0]]
    for before, path in pairwise([(), *tree.paths]):
        shared = sum(accumulate(map(eq, path, before), and_))
        paths.append(paths[-1][: shared + 1])
        for node in path[shared:]:
            parents.append(paths[-1][-1])
            paths[-1].append(len(lengths))
            lengths.append(tree.lengths[node])
    children = Counter(parents)
    rows: list[Row] = []
    row_of: dict[int, Row] = {}
    chain: list[int] = []
    start = end = 0
    for node in range(1, len(parents)):
        chain.append(node)
        end += lengths[node]
        if children[node] != 1:  # else it is one row with what is behind it
            rows.append(Row(start, end - start, row_of.get(parents[chain[0]])))
            row_of.update(dict.fromkeys(chain, rows[-1]))
            start, chain = end, []
    return rows, [row_of[path[-1]].path[:size] for path, size in zip(paths[1:], sizes, strict=True)]


@dataclass(frozen=True, eq=False)
class Segments:
    """The attention context of a packed micro-batch: causal within a row, what rows share computed once.

    Attributes:
        rows: in the order of the flat row, which they cover.
        places: where the tokens of each sample lie in it.
        device: of the forward.
    """

    rows: Sequence[Row]
    places: Sequence[Indices]
    device: torch.device

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """query `[T, H, D]`, key and value `[T, K, D]` -> `[T, H, D]`. The same for every layer."""
        if (kernel := flash.flash_attention(value)) is not None:
            return varlen_attend(kernel, query, key, value, self._ragged, scale, window)
        return attend(query, key, value, self.buckets, scale, window)

    @cached_property
    def _ragged(self) -> Ragged:
        return Ragged(self.rows, self.device)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Rows sorted by size, largest first, cut where padding would waste too much or scores take too much."""
        buckets: list[list[Row]] = []
        real = before = longest = 0
        # Prefixes of nearly equal length stand together, and among them rows of nearly equal length.
        lengths = np.array([(row.length, len(row.prefix) // 32) for row in self.rows])
        for row in (self.rows[number] for number in np.lexsort(-lengths.T)):
            prefix = len(row.prefix)
            size = row.length * (prefix + row.length)
            if buckets:
                before, longest = max(before, prefix), max(longest, row.length)
                padded = (len(buckets[-1]) + 1) * longest * (before + longest)
                if padded <= _WASTE * (real + size) and (self.device.type != "cpu" or padded <= PIECE):
                    buckets[-1].append(row)
                    real += size
                    continue
            buckets.append([row])
            real, before, longest = size, prefix, row.length
        return [Bucket(bucket, self.device) for bucket in buckets]

    def padded_rows(self) -> PaddedRows:
        """The layout for models that have no packed forward."""
        places, longest = self.places, max(map(len, self.places))
        source = np.stack(
            [np.pad(flat_row, (0, longest - len(flat_row)), constant_values=flat_row[0]) for flat_row in places]
        )
        copies = np.empty(sum(row.length for row in self.rows), dtype=np.int64)
        for number, flat_row in enumerate(places):
            copies[flat_row] = number * longest + np.arange(len(flat_row))
        mask = np.arange(longest) < np.array([[len(flat_row)] for flat_row in places])
        return PaddedRows(*(torch.from_numpy(array).to(self.device) for array in (source, mask, copies)))


class Bucket:
    """Rows that are attended in one go, padded to the longest.

    The keys of a row are laid out as its prefix, padded to P, then itself, padded; in all a multiple of the
    vector length.

    Attributes:
        queries: index of each row's tokens in the flat row, `[B, L]`; -1 in the padding.
        keys: index of what each row may see, `[B, M]`; -1 in the padding.
        before: length of each row's prefix, `[B]`.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device | str = "cpu") -> None:
        prefixes = [row.prefix for row in rows]
        table = torch.tensor([(row.start, row.length, len(row.prefix)) for row in rows])
        start, length, before = table.T[..., None]  # each `[B, 1]`
        self.size, self.longest, self.longest_prefix = len(rows), int(length.max()), int(before.max())
        self.num_keys = -(-(self.longest_prefix + self.longest) // VECTOR) * VECTOR
        self.device = torch.device(device)
        key = torch.arange(self.num_keys)
        query, own_key = key[: self.longest], key - self.longest_prefix
        queries = torch.where(query < length, start + query, -1)
        keys = torch.where((own_key >= 0) & (own_key < length), start + own_key, -1)
        keys[key < before] = torch.from_numpy(np.concatenate(prefixes))  # in the order of the rows
        self.queries, self.keys, self.before = (x.to(self.device) for x in (queries, keys, before[:, 0].contiguous()))
        self._masks: dict[int, Tensor] = {}

    def mask(self, window: int) -> Tensor:
        """Which of M keys each of L queries sees, `[B, L, M]`."""
        if window not in self._masks:
            query = torch.arange(self.longest, device=self.device)[:, None]
            key = torch.arange(self.num_keys, device=self.device)
            own_key = key - self.longest_prefix
            before = self.before[:, None, None]
            in_prefix = (key < before) & (before + query - key < window)
            self._masks[window] = in_prefix | ((own_key >= 0) & (own_key <= query) & (query - own_key < window))
        return self._masks[window]

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """First and last query of pieces of bounded size, and how many keys are all that they can see."""
        most = max(1, PIECE // (self.size * self.num_keys))
        for start in range(0, self.longest, most):
            stop = min(start + most, self.longest)
            yield start, stop, min(self.num_keys, -(-(self.longest_prefix + stop) // VECTOR) * VECTOR)


def attend(
    query: Tensor, key: Tensor, value: Tensor, buckets: list[Bucket], scale: float, window: int | None
) -> Tensor:
    """query `[T, H, D]`, key and value `[T, K, D]` -> `[T, H, D]`; every flat token is in one row of one bucket."""
    # Under autocast, rotary embeddings leave query and key in fp32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if query.device.type == "cpu":
        output: Tensor = _CpuAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, buckets, scale, _NO_WINDOW if window is None else window
        )
        return output
    return sdpa_attend(query, key, value, buckets, scale, window)


def sdpa_attend(
    query: Tensor, key: Tensor, value: Tensor, buckets: list[Bucket], scale: float, window: int | None
) -> Tensor:
    """`attend` by one SDPA call a bucket."""
    output = torch.empty_like(query)
    for bucket in buckets:
        index = bucket.queries.clamp(min=0)
        plain = not bucket.longest_prefix and (window is None or window >= bucket.longest)
        seen = index if plain else bucket.keys.clamp(min=0)
        mixed = scaled_dot_product_attention(
            query[index].transpose(1, 2),
            key[seen].transpose(1, 2),
            value[seen].transpose(1, 2),
            attn_mask=None if plain else bucket.mask(_NO_WINDOW if window is None else window)[:, None],
            is_causal=plain,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        real = bucket.queries >= 0
        output = output.index_copy(0, bucket.queries[real], mixed.transpose(1, 2)[real])
    return output


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, buckets: list[Bucket], scale: float, window: int
    ) -> Tensor:
        query, key, value = (x.contiguous() for x in (query, key, value))
        ctx.save_for_backward(query, key, value)
        ctx.buckets, ctx.scale, ctx.window = buckets, scale, window
        output = torch.empty_like(query)
        for bucket in buckets:
            steps = _Steps(bucket, scale, window, query)
            keys, values = (steps.gather(x, bucket.keys).flatten(0, 1) for x in (key, value))
            folded = (len(keys), -1, query.shape[-1])  # `[B, H, C, D]` as `[B * K, G * C, D]`
            for start, stop, seen in bucket.pieces():
                q = steps.gather(query, bucket.queries[:, start:stop])
                scores = torch.bmm(q.view(folded), keys[:, :seen].mT)
                p, _ = steps.softmax(scores.view(*q.shape[:3], seen), start)
                mixed = torch.bmm(p.view(scores.shape), values[:, :seen])
                steps.scatter(mixed.view(q.shape), output, start)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        outer = grads[0].contiguous()
        grad_query = torch.empty_like(query)
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        grad_key, grad_value = torch.zeros_like(key, dtype=exact), torch.zeros_like(value, dtype=exact)
        for bucket in ctx.buckets:
            steps = _Steps(bucket, ctx.scale, ctx.window, query)
            keys, values = (steps.gather(x, bucket.keys).flatten(0, 1) for x in (key, value))
            folded = (len(keys), -1, query.shape[-1])  # `[B, H, C, D]` as `[B * K, G * C, D]`
            # Pieces are added in fp32: in bf16 the later ones would hardly change a large sum.
            to_keys, to_values = torch.zeros_like(keys, dtype=exact), torch.zeros_like(values, dtype=exact)
            for start, stop, seen in bucket.pieces():
                index = bucket.queries[:, start:stop]
                heads = steps.gather(query, index)
                q, out = heads.view(folded), steps.gather(outer, index).view(folded)
                scores, to_p = torch.bmm(q, keys[:, :seen].mT), torch.bmm(out, values[:, :seen].mT)
                shape = (*heads.shape[:3], seen)
                p, to_scores = steps.softmax(scores.view(shape), start, to_p.view(shape))
                to_values[:, :seen] += torch.bmm(p.view(scores.shape).mT, out)
                to_keys[:, :seen] += torch.bmm(to_scores.view(scores.shape).mT, q)
                to_queries = torch.bmm(to_scores.view(scores.shape), keys[:, :seen])
                steps.scatter(to_queries.view(heads.shape), grad_query, start)
            for total, grad in ((grad_key, to_keys), (grad_value, to_values)):
                steps.scatter_add(grad.unflatten(0, (bucket.size, -1)), total)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


class _Steps:
    """What stands between the matrix products of a bucket: compiled where that can be, else in torch."""

    def __init__(self, bucket: Bucket, scale: float, window: int, like: Tensor) -> None:
        self.bucket, self.scale, self.window = bucket, scale, window
        self.kernels = None if like.shape[-1] % VECTOR else layer_kernels(like.dtype, like.device)

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        """`[T, H, D]` at `[B, L]` -> `[B, H, L, D]`, zeros where the index is -1."""
        if self.kernels is not None:
            return self.kernels.gather(x, index.contiguous())
        rows = x[index.clamp(min=0)].masked_fill_((index < 0)[..., None, None], 0)
        return rows.transpose(1, 2).contiguous()

    def scatter(self, rows: Tensor, out: Tensor, start: int) -> None:
        """The inverse, for the bucket's queries from `start`."""
        if self.kernels is not None:
            self.kernels.scatter(rows, self.bucket.queries, out, start)
            return
        index = self.bucket.queries[:, start : start + rows.shape[2]]
        out.index_copy_(0, index[index >= 0], rows.transpose(1, 2)[index >= 0])

    def scatter_add(self, rows: Tensor, total: Tensor) -> None:
        """Add what the bucket's keys got, `[B, K, M, D]`, to `[T, K, D]`; both fp32 or fp64."""
        if self.kernels is not None and (compiled := layer_kernels(rows.dtype, rows.device)) is not None:
            compiled.scatter_add(rows, self.bucket.keys, total)
            return
        real = self.bucket.keys >= 0
        add_rows(total, self.bucket.keys[real], rows.transpose(1, 2)[real])

    def softmax(self, scores: Tensor, start: int, grad: Tensor | None = None) -> tuple[Tensor, Any]:
        """Probabilities of scores `[B, H, C, M]` of the queries from `start`, in their place if need be; and, given the
        gradient of the probabilities, that of the scores."""
        bucket = self.bucket
        if self.kernels is not None:
            sizes = (bucket.before, bucket.longest_prefix, start, self.window)
            self.kernels.softmax(scores, *sizes, self.scale, grad)
            return scores, grad
        exact = scores if scores.dtype == torch.float64 else scores.float()
        mask = bucket.mask(self.window)[:, None, start : start + scores.shape[2], : scores.shape[3]]
        p = torch.softmax((exact * self.scale).masked_fill_(~mask, float("-inf")), -1)
        if grad is not None:
            grad = torch._softmax_backward_data(grad.to(p.dtype), p, -1, p.dtype).mul_(self.scale).to(scores.dtype)
        return p.to(scores.dtype), grad
