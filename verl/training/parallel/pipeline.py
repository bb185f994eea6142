"""Pipeline parallelism: stages of layers on different ranks, and micro-batches that pass through them.

Training runs one forward, one backward (1F1B; Narayanan et al. 2021, arXiv 2104.04473): stage s of n runs n - s forward
passes before its first backward pass, then one after each, so that no rank keeps the activations of more than n
micro-batches. All ranks of a pipeline get the same rows, so a stage knows the shapes it receives, and micro-batches of
different sizes need no padding.

Shapes: B padded rows (1 of flat tokens), T their tokens, E hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.algorithms.loss_terms import Loss
from verl.attention.segments import Packed, pack_rows
from verl.errors import ConfigError
from verl.models.llama import is_close
from verl.models.packed import PackedModel
from verl.training.engine import MicroBatch, Schedule
from verl.training.forward import Forward
from verl.training.gradients import Gradients
from verl.training.ranks import Parallel, Ranks
from verl.weights.shards import sample


def pipeline(forward: Forward, ranks: Ranks, parallel: Parallel, *, trains: bool) -> None:
    """Keep the layers of this rank's stage; embeddings stay on the first, the head on the last."""
    count = ranks.mesh.layout.pp
    cut = StageSplit(forward.model, forward.packed, count, trains=trains)
    tied = cut.parameters(0) & cut.parameters(count - 1)
    parallel.tied = frozenset(name for name, weight in forward.model.named_parameters() if weight in tied)
    stage, _ = cut.install(ranks.mesh.coordinate(ranks.rank)["pp"])
    parallel.schedule = schedule = Pipeline(forward, stage, ranks, parallel.tied)
    parallel.cut_dims += ("pp",)
    parallel.reductions.append(schedule.agree)


class _Pass(NamedTuple):
    """A micro-batch between its forward and its backward: what entered this stage, what left it, and its loss."""

    incoming: Tensor | None
    root: Tensor
    loss: Loss | None

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Backpropagate the output's gradient; returns the input's."""
        if self.root.requires_grad:
            torch.autograd.backward(self.root, gradient)
        if self.incoming is None:
            return None
        return torch.zeros_like(self.incoming) if self.incoming.grad is None else self.incoming.grad


class Pipeline(Schedule):
    """The `Schedule` of one stage.

    Args:
        tied: weights that the first and the last stage share.
    """

    def __init__(self, forward: Forward, stage: Stage, ranks: Ranks, tied: Collection[str]) -> None:
        forward.stage = stage
        self._forward, self._stage, self._tied = forward, stage, tied
        self._ranks, self._group = ranks, ranks.group("pp")
        members = dict(enumerate(ranks.mesh.group(ranks.rank, "pp")))
        self._before, self._after = members.get(stage.number - 1), members.get(stage.number + 1)
        #: The rank of the last stage for the first, and the other way round.
        self._other_end = {0: members[stage.count - 1], stage.count - 1: members[0]}.get(stage.number)
        self._depends = False

    def forward(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        for one in micro_batches:
            flat = self._forward.pack(one.batch, one.tree)
            outputs = self._run(one, flat, self._swap(self._before, receive=self._like(flat)))
            if self._stage.is_last:
                yield one.finish(outputs)
            else:
                self._swap(self._after, outputs["hidden"])

    def forward_backward(self, micro_batches: Iterable[MicroBatch], loss_scale: float) -> Iterator[Loss]:
        # Each round swaps once with the stage after (this forward's result, for a gradient that comes back), then once
        # with the stage before (what became of that gradient, for the next input). So two neighbours make equally many
        # swaps, in one order; with sends and receives by themselves both could be in a send, and wait forever.
        self._depends = False
        ahead = self._stage.count - 1 - self._stage.number
        coming = ((one, self._forward.pack(one.batch, one.tree)) for one in micro_batches)
        begun: deque[_Pass] = deque()
        following = next(coming, None)
        incoming_BTE = self._swap(self._before, receive=self._like(following and following[1]))
        while following is not None or begun:
            sent = None
            can_end = following is None or len(begun) == ahead
            if following is not None:
                begun.append(self._begin(*following, incoming_BTE, loss_scale))
                sent = begun[-1].root
                following = next(coming, None)
            ended = begun.popleft() if can_end else None
            gradient = self._swap(self._after, sent, None if ended is None else torch.empty_like(ended.root))
            back = None
            if ended is not None:
                with self._forward.precision():
                    back = ended.backward(gradient)
            incoming_BTE = self._swap(self._before, back, self._like(following and following[1]))
            if ended is not None and ended.loss is not None:
                yield ended.loss

    def agree(self, gradients: Gradients) -> None:
        """Sum the gradients of weights that the first and the last stage share; drop all gradients if the loss had
        none, since the last stage then sent zeros to the others."""
        depends = torch.tensor(float(self._depends))
        self._ranks.all_reduce([depends], dist.ReduceOp.MAX, ["pp"])
        if not depends:
            gradients.clear()
        if self._tied and self._other_end is not None:
            gradients.sum_over_ranks(self._reduce_over_ends, [w for w in gradients.weights if w.name in self._tied])

    def _begin(self, one: MicroBatch, flat: Packed, incoming_BTE: Tensor | None, loss_scale: float) -> _Pass:
        if incoming_BTE is not None:
            incoming_BTE.requires_grad_()
        outputs = self._run(one, flat, incoming_BTE)
        if not self._stage.is_last:
            return _Pass(incoming_BTE, outputs["hidden"], None)
        loss = one.finish(outputs)
        self._depends |= loss.total.requires_grad
        return _Pass(incoming_BTE, loss.total * loss_scale, loss.detached())

    def _run(self, one: MicroBatch, flat: Packed, incoming_BTE: Tensor | None) -> dict[str, Tensor]:
        self._stage.incoming = incoming_BTE
        with self._forward.precision():
            outputs: dict[str, Tensor] = self._forward(flat, one.want, one.temperature)
        self._stage.incoming = self._stage.outgoing = None
        return outputs if self._stage.is_last else {"hidden": outputs["hidden"].to(self._stage.dtype)}

    def _like(self, flat: Packed | None) -> Tensor | None:
        """An empty buffer `[B, T, E]` for the hidden states of a micro-batch."""
        if flat is None:
            return None
        packed = self._forward.packed
        rows = flat.context.padded_rows().source.shape if self._forward.is_padded else (1, len(flat.tokens))
        return torch.empty(*rows, self._stage.width, dtype=self._stage.dtype, device=packed.device)

    def _swap(self, peer: int | None, send: Tensor | None = None, receive: Tensor | None = None) -> Tensor | None:
        """Send to a neighbour and receive from it at once, in the same order as it does; returns what came."""
        if peer is None:
            return None
        ways = [(way, tensor) for way, tensor in ((dist.isend, send), (dist.irecv, receive)) if tensor is not None]
        pairs = [dist.P2POp(way, tensor.detach().contiguous(), peer, self._group) for way, tensor in ways]
        for work in dist.batch_isend_irecv(pairs) if pairs else ():
            work.wait()
        return receive

    def _reduce_over_ends(self, tensors: Sequence[Tensor], op: Any) -> None:
        for tensor in tensors:
            other = self._swap(self._other_end, tensor, torch.empty_like(tensor))
            if other is not None:
                tensor.copy_(torch.maximum(tensor, other) if op == dist.ReduceOp.MAX else tensor + other)


class Stage:
    """The part of a model on one rank: what enters its first layer, and what leaves its last.

    Attributes:
        number, count: which stage, of how many.
        width, dtype: of hidden states between layers.
        incoming: hidden states `[B, T, E]` of the stage before, for the next forward.
        outgoing: hidden states `[B, T, E]` for the stage after, of the last forward.
    """

    def __init__(self, number: int, count: int, width: int, dtype: torch.dtype) -> None:
        self.number, self.count, self.width, self.dtype = number, count, width, dtype
        self.is_last = number == count - 1
        self.incoming: Tensor | None = None
        self.outgoing: Tensor | None = None


class _Around(NamedTuple):
    """A module outside the stack of layers, and whether it belongs to the end of the pipeline, or to its beginning."""

    parent: nn.Module
    name: str
    module: nn.Module
    at_end: bool


class StageSplit:
    """How a model is cut into `count` stages. For a model without weights, a small sample of it is tried out.

    Args:
        packed: `model`, or its backbone.
        trains: each stage needs something to train.

    Raises:
        ConfigError: the model cannot be cut, or a stage has nothing to train.
    """

    def __init__(self, model: nn.Module, packed: PackedModel, count: int, *, trains: bool = False) -> None:
        self._packed, self.count = packed, count
        layers = packed.num_layers
        self._bounds = [-(-layers * stage // count) for stage in range(count + 1)]
        path = next((n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == layers), "")
        if not path:
            raise self._refused("it has no list of layers")
        self._stack: Any = model.get_submodule(path)
        self._gives_tuple, self._width = False, 0
        flat = pack_rows([[5, 17, 3], [23, 2]], [[19, 7, 31], [4, 11]], packed.device, keep_last=True)
        self._hidden = partial(packed.hidden, flat.tokens % packed.vocab_size, flat.positions, flat.context)
        self._around: list[_Around]
        if any(weight.is_meta for weight in model.parameters()):
            small = sample(packed.model, packed.device, layers=2)
            tried = StageSplit(small, PackedModel(small, fused_kernels=False), 2)
            self._gives_tuple, self._width = tried._gives_tuple, tried._width
            at_end = {one.name: one.at_end for one in tried._around}
            self._around = [_Around(*one, at_end.get(one[1], True)) for one in self._beside(model, path)]
        else:
            self._around, expected = self._trial(model, path)
            self._check(expected)
        for number in range(count) if trains else ():
            if not any(weight.requires_grad for weight in self.parameters(number)):
                raise ConfigError(
                    f"layout: pp={count} leaves stage {number} with nothing to train: its weights are frozen"
                )

    def parameters(self, number: int) -> set[nn.Parameter]:
        """The parameters of a stage; tied ones may be on the first stage and on the last."""
        layers = self._stack[self._bounds[number] : self._bounds[number + 1]]
        kept = [one.module for one in self._around if self._keeps(number, one)]
        return {weight for module in (*layers, *kept) for weight in module.parameters()}

    @torch.no_grad()
    def _trial(self, model: nn.Module, path: str) -> tuple[list[_Around], Tensor]:
        """The modules around the stack, by when a forward calls them, and the hidden states of that forward."""
        beside = [*self._beside(model, path)]
        ran: list[tuple[int, Any]] = []  # layers, and what they gave
        called: list[tuple[nn.Module, int]] = []  # other modules, and how many layers had run before
        with ExitStack() as hooks:
            for index, layer in enumerate(self._stack):
                hooks.enter_context(layer.register_forward_hook(lambda *a, i=index: ran.append((i, a[-1]))))
            for *_, one in beside:
                hooks.enter_context(one.register_forward_pre_hook(lambda one, _: called.append((one, len(ran)))))
            hidden = self._hidden()
        layers, first = len(self._stack), dict(reversed(called))
        if [index for index, _ in ran] != list(range(layers)) or any(0 < before < layers for before in first.values()):
            raise self._refused("its layers do not simply follow one another")
        output = ran[-1][1]
        self._gives_tuple = isinstance(output, tuple)
        self._width = (output[0] if self._gives_tuple else output).shape[-1]
        inside = set(self._packed.backbone.modules())
        return [_Around(*one, first.get(one[2], 0) > 0 or one[2] not in inside) for one in beside], hidden

    def _beside(self, model: nn.Module, path: str) -> Iterator[tuple[nn.Module, str, nn.Module]]:
        """(parent, name, module) of each sibling with weights, of the stack and of the modules that contain it."""
        parent = model
        for part in path.split("."):
            if direct := [name for name, _ in parent.named_parameters(recurse=False)]:
                raise self._refused(f"'{direct[0]}' belongs to no layer")
            for name, child in parent.named_children():
                if name != part and child.state_dict():
                    yield parent, name, child
            parent = parent.get_submodule(part)

    @torch.no_grad()
    def _check(self, expected: Tensor) -> None:
        hidden = expected
        incoming_BTE: Tensor | None = None
        for number in range(self.count):
            stage, replaced = self.install(number)
            stage.incoming = incoming_BTE
            try:
                hidden = self._hidden()
            except (RuntimeError, TypeError, AttributeError, IndexError) as error:
                raise self._refused(f"a stage of it does not run ({error})") from error
            finally:
                for parent, name, module in replaced:
                    parent._modules[name] = module
            incoming_BTE = stage.outgoing
        if not is_close(hidden, expected):
            raise self._refused("its stages compute something else than the whole")

    def install(self, number: int) -> tuple[Stage, list[tuple[nn.Module, str, nn.Module]]]:
        """Replace the modules of other stages; returns the stage that is left, and parent, name and module of each."""
        stage = Stage(number, self.count, self._width, self._packed.dtype)
        low, high = self._bounds[number : number + 2]
        others = [(self._stack, str(index), layer) for index, layer in enumerate(self._stack)]
        replaced = others[:low] + others[high:]
        absent = [_Absent(layer, stage, self._gives_tuple) for *_, layer in replaced]
        if low:
            absent[low - 1].enters = True
        if high < len(others):
            absent[low].leaves = True
        for parent, name, module, _ in (one for one in self._around if not self._keeps(number, one)):
            replaced.append((parent, name, module))
            absent.append(_Absent(module, stage))
        for (parent, name, _), module in zip(replaced, absent, strict=True):
            parent._modules[name] = module
        return stage, replaced

    def _keeps(self, number: int, one: _Around) -> bool:
        """A weight of the first stage that is tied to one of the last stays there, too, under its name."""
        if number == self.count - 1:
            last = {weight for other in self._around if other.at_end for weight in other.module.parameters()}
            return one.at_end or any(weight in last for weight in one.module.parameters())
        return number == 0 and not one.at_end

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"layout: {type(self._packed.model).__name__} cannot be cut into pp={self.count} stages: {why}. Use pp=1"
        )


class _Absent(nn.Module):
    """Stands in for a module of another stage: passes hidden states on, and turns ids into zeros.

    It has the module's plain attributes, which some models read of their layers.

    Attributes:
        enters: it is the layer before the stage, and gives what has come from the stage before.
        leaves: it is the layer after the stage, and keeps what it is given for the stage after.
    """

    def __init__(self, module: nn.Module, stage: Stage, gives_tuple: bool = False) -> None:
        super().__init__()
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, str | int | float | bool):
                setattr(self, name, value)
        self._stage, self._gives_tuple, self.enters, self.leaves = stage, gives_tuple, False, False

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        stage = self._stage
        if not x.is_floating_point():
            x = torch.zeros(*x.shape, stage.width, dtype=stage.dtype, device=x.device)
        if self.enters:
            assert stage.incoming is not None
            x = stage.incoming
        if self.leaves:
            stage.outgoing = x
        return (x,) if self._gives_tuple else x
