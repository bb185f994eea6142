"""The base of `Actor` and `Critic`: a handle of a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from verl.cluster.controller import Controller
from verl.errors import CheckpointError, ConfigError
from verl.models.lora import add_lora, has_adapters
from verl.models.options import ModelOptions
from verl.models.portable import PortableModel
from verl.models.source import Kind, ModelFiles, ModelSource
from verl.training.options import EngineOptions
from verl.weights.shard import Shard
from verl.weights.shards import outline
from verl.workers.actor import ReferenceWorker
from verl.workers.trained import TrainedWorker
from verl.workers.update import MiniBatchPlan

if TYPE_CHECKING:
    from torch import Tensor

    from verl.cluster.group import RankGroup

P = ParamSpec("P")
H = TypeVar("H", bound="ModelHandle[Any]")
W_co = TypeVar("W_co", bound=TrainedWorker, covariant=True)


class LoraBase(NamedTuple):
    """The frozen base of a role's adapters. Checkpoints leave it out, since it can be loaded from its own files.

    Attributes:
        trained: names of the weights that are not in the base.
    """

    files: ModelFiles
    trained: tuple[str, ...]

    @classmethod
    def of(cls, files: ModelFiles, model: Any) -> LoraBase:
        """The base of a model with adapters."""
        return cls(files, tuple(name for name, weight in model.named_parameters() if weight.requires_grad))


def check_base(saved: dict[str, str], base: LoraBase | None) -> None:
    """Raises CheckpointError: the base that a checkpoint names is not this one."""
    if base is None or base.files.digest != saved["sha256"]:
        here = "a model that was not read from files" if base is None else base.files.path
        raise CheckpointError(
            f"the checkpoint holds adapters alone, of the base that was at {saved['path']}; here they would be added "
            f"to {here}, whose files differ: give model.path the base of then"
        )


class ModelHandle(Generic[W_co]):
    """A trained model: where it runs, how it is trained, its weights and state.

    Attributes:
        role: its pool in the placement.
        modules: the model's modules and configuration; the weights may be elsewhere.
        files: what workers in other processes read the model from; it has no weights here then.
        base: what adapters were added to, if checkpoints need not hold it.
        train_options: how it is trained.
        plan: how a batch becomes optimizer steps.
    """

    role = "actor"
    modules: Any
    controller: Controller
    train_options: EngineOptions
    plan: MiniBatchPlan
    files: ModelFiles | None = None
    base: LoraBase | None = None
    _group: RankGroup[W_co] | None = None
    #: Of an actor: those of its reference policy.
    _reference: RankGroup[ReferenceWorker] | None = None
    _outline: dict[str, Tensor] | None = None

    @classmethod
    def from_pretrained(cls: Callable[Concatenate[str, P], H], name: str, *args: P.args, **options: P.kwargs) -> H:
        """Make a handle from a transformers model's name or directory; takes the options of the class."""
        return cls(name, *args, **options)

    @property
    def group(self) -> RankGroup[W_co]:
        """The workers; made when they are first needed."""
        if self._group is None:
            self._outline = outline(self.modules)
            self._group = self._make_group(self.files or PortableModel(self.modules))
        return self._group

    def _make_group(self, source: ModelSource) -> RankGroup[W_co]:
        """The workers, each of which makes its model from `source`."""
        raise NotImplementedError

    @property
    def has_workers(self) -> bool:
        """Whether the workers have been made, which fixes their layout."""
        return self._group is not None

    @property
    def outline(self) -> Mapping[str, Tensor]:
        """The whole weights on the meta device, by name. Workers of this process may cut the model that was given."""
        return outline(self.modules) if self._outline is None else self._outline

    def set_placement(self, placement: Any) -> None:
        """Run where `placement` says, see `DeviceMesh`.

        Raises:
            ConfigError: the placement cannot be met, or the workers have been made already.
        """
        if self.has_workers or self._reference is not None:
            raise ConfigError(f"the {self.role}'s workers are in place: say where they run before the first call")
        self.controller = Controller.of(placement)
        if self.files is not None and self.controller.is_local:
            self.modules, self.files = self.files.load(), None

    def train_with(self, **options: Any) -> None:
        """Change fields of `train_options` (`EngineOptions`).

        Raises:
            ConfigError: the workers have been made already, with others.
        """
        changed = self.train_options.replace(**options)
        if self.has_workers and changed != self.train_options:
            said = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise ConfigError(
                f"the {self.role}'s workers are in place: say how they train ({said}) before the first call"
            )
        self.train_options = changed

    def shards(self) -> Iterator[Shard]:
        """The weights, a value head included, as a stream of named shards."""
        return self.group.call(TrainedWorker.shards)

    def load_shards(self, shards: Iterable[Shard]) -> None:
        """Replace the weights, those that generate included."""
        self.base = None
        self.group.call(TrainedWorker.load_shards, shards)

    def save(self, folder: str, background: bool = False) -> dict[str, Any]:
        """Begin to write the weights, without their base, and the optimizer's state into a directory that all ranks
        see, every rank its shards. The group's `saved` ends it and names the files; see `TrainedWorker`.

        Args:
            background: copy the shards to host memory, and write them while training goes on.

        Returns:
            Metadata for `load`, as JSON.
        """
        if self.base is None or self.base.files.digest is None:
            return self.group.call(TrainedWorker.save, folder, background)
        meta = self.group.call(TrainedWorker.save, folder, background, self.base.trained)
        return {**meta, "base": {"path": self.base.files.path, "sha256": self.base.files.digest}}

    def load(self, weights: Sequence[str], optimizer: Sequence[str], meta: Mapping[str, Any]) -> None:
        """Go on from what `save` wrote and returned, at any layout.

        Args:
            weights, optimizer: files, which every rank reads its shards from.

        Raises:
            CheckpointError: it is of another model, base or optimizer, or incomplete.
        """
        rest = dict(meta)
        saved, names = rest.pop("base", None), None
        if saved is None:
            self.base = None  # which the checkpoint replaces
        else:
            check_base(saved, self.base)
            assert self.base is not None
            names = self.base.trained
        self.group.call(TrainedWorker.load, weights, optimizer, rest, names)

    def _read_model(self, loading: ModelOptions, kind: Kind, seed: int, live: Callable[[], Any]) -> None:
        """Read the model that the settings name, or else take the one that `live` returns."""
        files = ModelFiles.of(loading, kind, seed) if loading.path is not None else None
        if files is not None:
            self.files = None if self.controller.is_local or loading.dtype == "int4" else files
            self.modules = files.load() if self.files is None else files.on_meta()
        else:
            self.modules = live()
            if loading.lora is not None:
                add_lora(self.modules, loading.lora, seed)
            elif has_adapters(self.modules):
                from verl.models.check import check_adapters

                check_adapters(self.modules)
        if loading.lora is not None and files is not None:
            self.base = LoraBase.of(files, self.modules)
