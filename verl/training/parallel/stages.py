"""A model cut into pipeline stages: which of its modules a stage keeps, and what stands in the place of the others.

A stage is the same backbone without the weights of the other stages. Modules stay where they are, so weights keep
their names and layers their index: an absent layer hands its input on, an absent embedding makes zeros, and the
hidden states of the stage before enter in front of the first layer kept. Whether the stages one after the other compute
what the whole model does is tried out before anything is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verl.attention.segments import pack_rows
from verl.errors import ConfigError
from verl.models.llama import is_close
from verl.models.packed import PackedModel
from verl.weights.meta import is_on_meta, sample

_FIRST, _LAST = "first", "last"


class Stage:
    """The part of a model on one rank: what enters its first layer, and what leaves its last.

    Attributes:
        number, count: which stage, of how many.
        width, dtype: of hidden states between layers.
        incoming: hidden states of the stage before, for the next forward.
        outgoing: hidden states for the stage after, of the last forward.
    """

    def __init__(self, number: int, count: int, width: int, dtype: torch.dtype) -> None:
        self.number, self.count, self.width, self.dtype = number, count, width, dtype
        self.incoming: Tensor | None = None
        self.outgoing: Tensor | None = None

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def enter(self, _: Tensor) -> Tensor:
        """Return the hidden states received from the previous stage."""
        assert self.incoming is not None
        return self.incoming

    def leave(self, hidden: Tensor) -> Tensor:
        """Keep the hidden states of the last layer here, for the next stage."""
        self.outgoing = hidden
        return hidden


class _Around(NamedTuple):
    """A module beside the stack of layers, and which end of the pipeline it belongs to."""

    parent: nn.Module
    name: str
    module: nn.Module
    end: str


class StageSplit:
    """How a model is cut into `count` stages. One without weights is tried out by a sample of it.

    Args:
        packed: `model`, or its backbone.

    Raises:
        ConfigError: it is of a kind that cannot be cut.
    """

    def __init__(self, model: nn.Module, packed: PackedModel, count: int) -> None:
        self._packed, self.count = packed, count
        self._kind = type(packed.model).__name__
        layers = packed.num_layers
        self._bounds = [-(-layers * stage // count) for stage in range(count + 1)]
        path = next((n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == layers), "")
        if not path:
            raise self._refused("it has no list of layers")
        self._stack: Any = model.get_submodule(path)
        self._gives_tuple, self._width = False, 0
        self._tokens = pack_rows([[5, 17, 3], [23, 2]], [[19, 7, 31], [4, 11]], self._packed.device, keep_last=True)
        if not is_on_meta(model):
            self._around, expected = self._trial(model, path)
            self._check(expected)
            return
        small = sample(packed.model, packed.device, layers=2)
        tried = StageSplit(small, PackedModel(small, fused_kernels=False), 2)
        self._gives_tuple, self._width = tried._gives_tuple, tried._width
        ends = {one.name: one.end for one in tried._around}
        self._around = [_Around(*one, ends.get(one[1], _LAST)) for one in self._beside(model, path)]

    def keep(self, number: int) -> Stage:
        """Drop what is not of this stage from the model, for good."""
        stage = Stage(number, self.count, self._width, self._packed.dtype)
        self._install(stage)
        return stage

    def parameters(self, number: int) -> set[nn.Parameter]:
        """The parameters of a stage; tied ones may be on the first stage and on the last."""
        layers = self._stack[self._bounds[number] : self._bounds[number + 1]]
        kept = [one.module for one in self._around if self._keeps(number, one)]
        return {weight for module in (*layers, *kept) for weight in module.parameters()}

    def _trial(self, model: nn.Module, path: str) -> tuple[list[_Around], Tensor]:
        """The modules around the stack, by when a forward calls them, and the hidden states of that forward."""
        layers, calls, called = len(self._stack), list[int](), dict[nn.Module, int]()
        beside = [*self._beside(model, path)]

        def layer_ran(index: int, output: Any) -> None:
            calls.append(index)
            self._gives_tuple = isinstance(output, tuple)
            self._width = (output[0] if self._gives_tuple else output).shape[-1]

        def other_runs(module: nn.Module, _: Any) -> None:
            called.setdefault(module, len(calls))

        hooks = [
            *(layer.register_forward_hook(lambda *a, i=i: layer_ran(i, a[-1])) for i, layer in enumerate(self._stack)),
            *(module.register_forward_pre_hook(other_runs) for *_, module in beside),
        ]
        try:
            hidden = self._hidden()
        finally:
            for hook in hooks:
                hook.remove()
        if calls != list(range(layers)) or any(0 < before < layers for before in called.values()):
            raise self._refused("its layers do not simply follow one another")
        inside = set(self._packed.backbone.modules())
        ends = [_LAST if called.get(m, 0) or m not in inside else _FIRST for *_, m in beside]
        return [_Around(*one, end) for one, end in zip(beside, ends, strict=True)], hidden

    def _beside(self, model: nn.Module, path: str) -> Iterator[tuple[nn.Module, str, nn.Module]]:
        """Modules with weights beside the stack, or beside a module that contains it: parent, name, module."""
        parent = model
        for part in path.split("."):
            if direct := [name for name, _ in parent.named_parameters(recurse=False)]:
                raise self._refused(f"'{direct[0]}' belongs to no layer")
            for name, child in parent.named_children():
                if name != part and child.state_dict():
                    yield parent, name, child
            parent = parent.get_submodule(part)

    def _check(self, expected: Tensor) -> None:
        hidden = expected
        incoming: Tensor | None = None
        for number in range(self.count):
            stage = Stage(number, self.count, self._width, self._packed.dtype)
            stage.incoming = incoming
            replaced = self._install(stage)
            try:
                hidden = self._hidden()
            except (RuntimeError, TypeError, AttributeError, IndexError) as error:
                raise self._refused(f"a stage of it does not run ({error})") from error
            finally:
                for parent, name, module in replaced:
                    parent._modules[name] = module
            incoming = stage.outgoing
        if not is_close(hidden, expected):
            raise self._refused("its stages compute something else than the whole")

    @torch.no_grad()
    def _hidden(self) -> Tensor:
        flat = self._tokens
        return self._packed.hidden(flat.tokens % self._packed.vocab_size, flat.positions, flat.context)

    def _install(self, stage: Stage) -> list[tuple[nn.Module, str, nn.Module]]:
        """Replace the modules of other stages; returns parent, name and module of each."""
        low, high = self._bounds[stage.number : stage.number + 2]
        absent: list[tuple[nn.Module, str, nn.Module]] = []
        for index, layer in enumerate(self._stack):
            if not low <= index < high:
                edge = {low - 1: stage.enter, high: stage.leave}.get(index)
                absent.append((self._stack, str(index), _Absent(layer, stage, edge, self._gives_tuple)))
        for one in self._around:
            if not self._keeps(stage.number, one):
                absent.append((one.parent, one.name, _Absent(one.module, stage)))
        replaced = [(parent, name, parent.get_submodule(name)) for parent, name, _ in absent]
        for parent, name, module in absent:
            parent._modules[name] = module
        return replaced

    def _keeps(self, number: int, one: _Around) -> bool:
        """A weight of the first stage that is tied to one of the last stays there, too, under its name."""
        if number == self.count - 1:
            last = {weight for other in self._around if other.end == _LAST for weight in other.module.parameters()}
            return one.end == _LAST or any(weight in last for weight in one.module.parameters())
        return number == 0 and one.end == _FIRST

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"layout: {self._kind} cannot be cut into pp={self.count} stages: {why}. Use pp=1")


class _Absent(nn.Module):
    """In the place of a module of another stage: hands hidden states on, and makes zeros of ids.

    It has the module's plain attributes, which some models read of their layers.
    """

    def __init__(
        self, module: nn.Module, stage: Stage, edge: Callable[[Tensor], Tensor] | None = None, gives_tuple: bool = False
    ) -> None:
        super().__init__()
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, str | int | float | bool):
                setattr(self, name, value)
        self._width, self._dtype = stage.width, stage.dtype
        self._edge, self._gives_tuple = edge, gives_tuple

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        if not x.is_floating_point():
            x = torch.zeros(*x.shape, self._width, dtype=self._dtype, device=x.device)
        if self._edge is not None:
            x = self._edge(x)
        return (x,) if self._gives_tuple else x
