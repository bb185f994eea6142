"""A micro-batch as flat tokens, and causal attention over them.

Rows of one group share one forward of their common prefix (`prefix_tree`): it is in the flat row once, followed by the
rest of each row. Where flash attention takes rows of different lengths it gets them as they are; elsewhere rows of
nearly equal size are put into buckets. A T x T mask never exists.

On CPU attention over buckets is written out in matrix products: torch's flash kernel for CPU is several times slower at
the lengths of training rows, above all in the backward. The steps between the products (gathering heads, softmax,
scattering) are compiled where that is possible. Query heads are folded onto their key/value head, so keys are never
repeated for heads; scores exist for one piece of bounded size at a time and are recomputed in the backward, so only
query, key and value are saved. The softmax is fp32 (fp64 for fp64). On other devices each bucket is one call of SDPA.

Legend: T flat tokens, S samples, R response tokens of all samples, B rows of a bucket, L the longest row, P length of
the longest prefix, M >= P + L keys, C queries of a piece, N <= M keys that they can see, H query heads, K key/value
heads, G = H / K, D head size; F = B * K and Q = G * C, folded.
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
from verl.attention.varlen import VarlenKeys
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
        """Predictions of the response tokens under the mask `[R]` alone; the others are 0."""
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
    """Tokens `start` to `start + length` of the flat row, causal; they also see all tokens of their parent, and its
    prefix: as the tokens of a response see the prompt."""

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
        share_prompts: adjacent samples with equal prompts share one forward of their common prefix, and so do prompts
            that begin alike for `prefix_tree.LEAST_BETWEEN` tokens, `LEAST_BETWEEN_ON_DEVICE` on an accelerator. The
            numbers do not change.
        keep_last: feed the last response token too. Nothing is predicted from it, so it is left out by
            default; scores at the last token need it.
        tree: of the samples without their last response token; None: one made of their prompts.

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
    rows, indices = _layout(tree, list(map(len, fed)))
    tokens, positions = np.empty((2, sum(row.length for row in rows)), dtype=np.int64)
    for index, row in zip(indices, fed, strict=True):
        tokens[index], positions[index] = row, np.arange(len(row))
    # The last token of a prompt predicts the first of the response, which predicts the second, and so on.
    predict = [index[length - 1 :][: len(r)] for index, length, (_, r) in zip(indices, lengths, samples, strict=True)]
    targets = [token for _, response in samples for token in response]
    device = torch.device(device)
    flat = (tokens, positions, np.concatenate(predict), targets, [index[-1] for index in indices])
    tokens_T, positions_T, predict_R, targets_R, last_S = (
        to_device(torch.from_numpy(np.asarray(values, dtype=np.int64)), device) for values in flat
    )
    return Packed(tokens_T, positions_T, Segments(rows, indices, device), predict_R, targets_R, last_S)


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
        indices: where the tokens of each sample lie in it.
        device: of the forward.
    """

    rows: Sequence[Row]
    indices: Sequence[Indices]
    device: torch.device

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """The attention output `[T, H, D]`. The same for every layer."""
        if (kernel := flash.flash_attention(v_TKD)) is not None:
            return self._varlen.attend(kernel, q_THD, k_TKD, v_TKD, scale, window)
        return attend(q_THD, k_TKD, v_TKD, self.buckets, scale, window)

    @cached_property
    def _varlen(self) -> VarlenKeys:
        return VarlenKeys(self.rows, self.device)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Rows sorted by size, largest first, cut where padding would waste too much or scores take too much."""
        buckets: list[list[Row]] = []
        real = before = longest = 0
        # Sorted by the length of their prefixes, roughly, then by their own.
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
        indices, longest = self.indices, max(map(len, self.indices))
        source = np.stack(
            [np.pad(flat_row, (0, longest - len(flat_row)), constant_values=flat_row[0]) for flat_row in indices]
        )
        copies = np.empty(sum(row.length for row in self.rows), dtype=np.int64)
        for number, flat_row in enumerate(indices):
            copies[flat_row] = number * longest + np.arange(len(flat_row))
        mask = np.arange(longest) < np.array([[len(flat_row)] for flat_row in indices])
        return PaddedRows(*(torch.from_numpy(array).to(self.device) for array in (source, mask, copies)))


class Bucket:
    """Rows that are attended in one go, padded to the longest.

    The keys of a row are laid out as its prefix, padded to P, then itself, padded; in all a multiple of the
    vector length.

    Attributes:
        queries: index of each row's tokens in the flat row, `[B, L]`; -1 in the padding.
        keys: index of the tokens that each row may see, `[B, M]`; -1 in the padding.
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
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, buckets: list[Bucket], scale: float, window: int | None
) -> Tensor:
    """The attention output `[T, H, D]`; every flat token is in one row of one bucket."""
    # Under autocast, rotary embeddings leave query and key in fp32.
    inputs = (q_THD.to(v_TKD.dtype), k_TKD.to(v_TKD.dtype), v_TKD, buckets, scale)
    if not v_TKD.is_cpu:
        return sdpa_attend(*inputs, window)
    output: Tensor = _CpuAttention.apply(*inputs, _NO_WINDOW if window is None else window)  # type: ignore[no-untyped-call]
    return output


def sdpa_attend(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, buckets: list[Bucket], scale: float, window: int | None
) -> Tensor:
    """`attend` by one SDPA call a bucket."""
    out_THD = torch.empty_like(q_THD)
    for bucket in buckets:
        index = bucket.queries.clamp(min=0)
        plain = not bucket.longest_prefix and (window is None or window >= bucket.longest)
        seen = index if plain else bucket.keys.clamp(min=0)
        mixed_BHLD = scaled_dot_product_attention(
            q_THD[index].transpose(1, 2),
            k_TKD[seen].transpose(1, 2),
            v_TKD[seen].transpose(1, 2),
            attn_mask=None if plain else bucket.mask(_NO_WINDOW if window is None else window)[:, None],
            is_causal=plain,
            scale=scale,
            enable_gqa=q_THD.shape[1] != k_TKD.shape[1],
        )
        real = bucket.queries >= 0
        out_THD = out_THD.index_copy(0, bucket.queries[real], mixed_BHLD.transpose(1, 2)[real])
    return out_THD


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, buckets: list[Bucket], scale: float, window: int
    ) -> Tensor:
        q_THD, k_TKD, v_TKD = (x.contiguous() for x in (q_THD, k_TKD, v_TKD))
        ctx.save_for_backward(q_THD, k_TKD, v_TKD)
        ctx.buckets, ctx.scale, ctx.window = buckets, scale, window
        out_THD = torch.empty_like(q_THD)
        for bucket in buckets:
            steps = _Steps(bucket, scale, window, q_THD)
            k_FMD, v_FMD = (steps.gather(x, bucket.keys).flatten(0, 1) for x in (k_TKD, v_TKD))
            folded = (len(k_FMD), -1, q_THD.shape[-1])
            for start, stop, seen in bucket.pieces():
                q_BHCD = steps.gather(q_THD, bucket.queries[:, start:stop])
                scores_FQN = torch.bmm(q_BHCD.view(folded), k_FMD[:, :seen].mT)
                p_BHCN, _ = steps.softmax(scores_FQN.view(*q_BHCD.shape[:3], seen), start)
                mixed_FQD = torch.bmm(p_BHCN.view(scores_FQN.shape), v_FMD[:, :seen])
                steps.scatter(mixed_FQD.view(q_BHCD.shape), out_THD, start)
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TKD, v_TKD = ctx.saved_tensors
        dout_THD, dq_THD = grads[0].contiguous(), torch.empty_like(q_THD)
        exact = torch.promote_types(q_THD.dtype, torch.float32)
        dk_TKD, dv_TKD = torch.zeros_like(k_TKD, dtype=exact), torch.zeros_like(v_TKD, dtype=exact)
        for bucket in ctx.buckets:
            steps = _Steps(bucket, ctx.scale, ctx.window, q_THD)
            k_FMD, v_FMD = (steps.gather(x, bucket.keys).flatten(0, 1) for x in (k_TKD, v_TKD))
            folded = (len(k_FMD), -1, q_THD.shape[-1])
            # Pieces are added in fp32: in bf16 the later ones would hardly change a large sum.
            dk_FMD, dv_FMD = torch.zeros_like(k_FMD, dtype=exact), torch.zeros_like(v_FMD, dtype=exact)
            for start, stop, seen in bucket.pieces():
                index = bucket.queries[:, start:stop]
                q_BHCD = steps.gather(q_THD, index)
                q_FQD, dout_FQD = q_BHCD.view(folded), steps.gather(dout_THD, index).view(folded)
                scores_FQN, dp_FQN = torch.bmm(q_FQD, k_FMD[:, :seen].mT), torch.bmm(dout_FQD, v_FMD[:, :seen].mT)
                shape = (*q_BHCD.shape[:3], seen)
                p_BHCN, ds_BHCN = steps.softmax(scores_FQN.view(shape), start, dp_FQN.view(shape))
                p_FQN, ds_FQN = p_BHCN.view(scores_FQN.shape), ds_BHCN.view(scores_FQN.shape)
                dv_FMD[:, :seen] += torch.bmm(p_FQN.mT, dout_FQD)
                dk_FMD[:, :seen] += torch.bmm(ds_FQN.mT, q_FQD)
                steps.scatter(torch.bmm(ds_FQN, k_FMD[:, :seen]).view(q_BHCD.shape), dq_THD, start)
            for total, grad in ((dk_TKD, dk_FMD), (dv_TKD, dv_FMD)):
                steps.scatter_add(grad.unflatten(0, (bucket.size, -1)), total)
        return dq_THD, dk_TKD.to(k_TKD.dtype), dv_TKD.to(v_TKD.dtype), None, None, None


class _Steps:
    """The steps between the matrix products of a bucket: compiled where possible, else in torch."""

    def __init__(self, bucket: Bucket, scale: float, window: int, like: Tensor) -> None:
        self.bucket, self.scale, self.window = bucket, scale, window
        self.kernels = None if like.shape[-1] % VECTOR else layer_kernels(like.dtype, like.device)

    def gather(self, x_THD: Tensor, index: Tensor) -> Tensor:
        """The heads `[B, H, L, D]` at the index `[B, L]`, zeros where it is -1."""
        if self.kernels is not None:
            out_BHLD = x_THD.new_empty(len(index), x_THD.shape[1], index.shape[1], x_THD.shape[2])
            self.kernels.gather(x_THD, index.contiguous(), out_BHLD, *index.shape, *x_THD.shape[1:])
            return out_BHLD
        rows = x_THD[index.clamp(min=0)].masked_fill_((index < 0)[..., None, None], 0)
        return rows.transpose(1, 2).contiguous()

    def scatter(self, x_BHCD: Tensor, out_THD: Tensor, start: int) -> None:
        """The inverse, for the bucket's queries from `start`."""
        if self.kernels is not None:
            sizes = (len(x_BHCD), x_BHCD.shape[2], self.bucket.longest, *out_THD.shape[1:])
            self.kernels.scatter(x_BHCD, self.bucket.queries[:, start:], out_THD, *sizes)
            return
        index = self.bucket.queries[:, start : start + x_BHCD.shape[2]]
        out_THD.index_copy_(0, index[index >= 0], x_BHCD.transpose(1, 2)[index >= 0])

    def scatter_add(self, x_BKMD: Tensor, total_TKD: Tensor) -> None:
        """Add the gradients of the bucket's keys to the flat row's; both fp32 or fp64."""
        if self.kernels is not None and (compiled := layer_kernels(x_BKMD.dtype, x_BKMD.device)) is not None:
            compiled.scatter_add(x_BKMD, self.bucket.keys, total_TKD, *self.bucket.keys.shape, *total_TKD.shape[1:])
            return
        real = self.bucket.keys >= 0
        add_rows(total_TKD, self.bucket.keys[real], x_BKMD.transpose(1, 2)[real])

    def softmax(self, scores_BHCN: Tensor, start: int, dp_BHCN: Tensor | None = None) -> tuple[Tensor, Any]:
        """Probabilities of the queries from `start`, in place with kernels; and the gradient of the scores, given the
        gradient of the probabilities."""
        bucket = self.bucket
        if self.kernels is not None:
            sizes = (*scores_BHCN.shape, bucket.longest_prefix, start, self.window)
            self.kernels.softmax(scores_BHCN, dp_BHCN, bucket.before, *sizes, self.scale)
            return scores_BHCN, dp_BHCN
        exact = scores_BHCN.to(torch.promote_types(scores_BHCN.dtype, torch.float32))
        mask = bucket.mask(self.window)[:, None, start : start + exact.shape[2], : exact.shape[3]]
        p_BHCN = torch.softmax((exact * self.scale).masked_fill_(~mask, float("-inf")), -1)
        if dp_BHCN is not None:
            ds_BHCN = torch._softmax_backward_data(dp_BHCN.to(p_BHCN.dtype), p_BHCN, -1, p_BHCN.dtype)
            dp_BHCN = ds_BHCN.mul_(self.scale).to(scores_BHCN.dtype)
        return p_BHCN.to(scores_BHCN.dtype), dp_BHCN
