"""A training step as a graph of nodes that read and add columns of one batch.

An edge is a column: a node that reads a column comes after the node that writes it. Columns that the system knows have
the types of `verl.batch.SCHEMA`. Nothing here runs anything: `verl.trainer.step` does. Every way of writing a step down
(the trainer's roles, `RLDataPipeline`, an expression, a task file) makes a `Graph`, so that two of them can be compared
with `==`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal, get_args

from verl._base.names import check_known
from verl.batch import SCHEMA, WRITTEN, Batch
from verl.errors import ConfigError, nearest

Kind = Literal["source", "rows", "batch", "forward", "update"]
#: As an input: every column of the samples and of all nodes that come before by other columns or `after`.
#: As an output: columns besides those named, known when they come.
ANY = "*"
#: The slot of the models of this process, which are mutually exclusive.
SLOT = "model"
#: Ends the name of a column that may be missing: "finish?" is read, or written, where there is one.
OPTIONAL = "?"
#: What prompts may bring of the columns the system knows; where a graph samples, a node has to write the others.
_OF_PROMPTS = frozenset(("id", "group", "task", "prompt", "messages", "prompt_tokens", "tokenizer", "label"))


@dataclass(frozen=True, kw_only=True)
class Node:
    """One piece of work on the batch.

    `kind` says what it works on:
        "source"  `run(prompts)` returns an iterator or async iterator of batches of finished samples, each
                  sample with a unique `id`, in whatever order they finish
        "rows"    `run(rows)` treats rows one by one, so it may be called on parts of the batch
        "batch"   `run(batch)` needs the whole batch; it may drop rows (its result then has a column `id`)
        "forward" a model's outputs for all samples, such as reference log-probs
        "update"  of the second half of a step, `verl.trainer.step.learn`, which is code: the graph shows it

    Names of columns may end in "?" (it may be missing) and, as outputs, in "*" ("reward/*": all that begin so).
    `run` gets the columns `inputs` and returns its new columns as a `Batch` or a mapping of lists, aligned with the
    rows it got, or `None`, or either in a pair with a dictionary of metrics. A plain function runs in the compute
    thread of the process, an async function on the event loop, where it must not block.

    slot: a slot runs one node at a time; empty: a slot of its own. A source holds its slot to the end.
    groups: for "rows", how many groups (the samples of one prompt) a call gets at a time; None: all.
    samples: for "source", the ids of the samples to come, one list for each row of the run's batch; they are
        one group. None: each row of the batch is a sample to be drawn and has its `id` already. The order is thus
        fixed before the first sample, and what comes after works on the same rows in every run.
    after: nodes that must have ended although no column of theirs is read. A "batch" node that reads "*" without
        these comes after all nodes declared before it.
    deadline: seconds for one call, or between two finished samples of a source; None: the run's.
    role: whose work it is, for the timeline; empty: the node's name.
    at_end: called when the graph has run.
    """

    name: str
    run: Callable[[Batch], Any] = field(compare=False, repr=False)
    kind: Kind = "rows"
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    slot: str = ""
    after: tuple[str, ...] = ()
    groups: int | None = field(default=1, compare=False)
    samples: Callable[[Batch], Sequence[Sequence[str]]] | None = field(default=None, compare=False, repr=False)
    deadline: float | None = field(default=None, compare=False)
    role: str = field(default="", compare=False)
    at_end: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Order of columns carries no meaning; sorted, two nodes of the same structure are equal.
        for name in ("inputs", "outputs", "after"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ConfigError(f"node '{self.name}': {name} must be a list of names, got the string '{value}'")
            object.__setattr__(self, name, tuple(sorted(set(value))))
        if wide := [column for column in self.inputs if column.endswith(ANY) and column != ANY]:
            raise ConfigError(f"node '{self.name}' reads {wide}: name the columns, or read '{ANY}', all of them")
        object.__setattr__(self, "slot", self.slot or self.name)
        if self.kind not in get_args(Kind):
            raise ConfigError(f"node '{self.name}': unknown kind '{self.kind}', {nearest(self.kind, get_args(Kind))}")
        if self.groups is not None and self.groups < 1:
            raise ConfigError(f"node '{self.name}': groups must be at least 1 or None, got {self.groups}")
        if self.deadline is not None and self.deadline <= 0:
            raise ConfigError(f"node '{self.name}': the deadline must be positive, got {self.deadline}")

    @property
    def reads(self) -> dict[str, bool]:
        """The columns that it names as inputs, and whether it needs them."""
        return {column.removesuffix(OPTIONAL): not column.endswith(OPTIONAL) for column in self.inputs if column != ANY}

    @property
    def writes(self) -> dict[str, bool]:
        """The columns that it names as outputs, and whether it always writes them."""
        named = [column for column in self.outputs if not column.endswith(ANY)]
        return {column.removesuffix(OPTIONAL): not column.endswith(OPTIONAL) for column in named}


class Graph:
    """A checked set of nodes: acyclic, each column written once, each column read there.

    inputs: columns that the batch given to a run has. Columns the system knows (`verl.batch`) and no node writes may
        be left out without a source: a run says which of them its batch lacks. User columns must be named.

    Raises:
        ConfigError: a cycle, two writers of a column, a column that nothing provides, an unknown node in
            `after`, two nodes of one name, more than one source.
    """

    def __init__(self, nodes: Iterable[Node], inputs: Iterable[str] = ()) -> None:
        ordered = list(nodes)
        self.nodes: dict[str, Node] = {node.name: node for node in ordered}
        if len(self.nodes) < len(ordered):
            names = [node.name for node in ordered]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"two nodes of the graph have the name '{twice}'")
        self.inputs = frozenset(inputs)
        sources = [node for node in ordered if node.kind == "source"]
        if len(sources) > 1:
            raise ConfigError("a graph has one source, got " + " and ".join(f"'{node.name}'" for node in sources))
        self.source = sources[0] if sources else None
        self.writers = self._find_writers()
        #: node -> the nodes it waits for, in order of declaration
        self.needs: Mapping[str, tuple[str, ...]] = {node.name: self._needs(node) for node in ordered}
        #: Names so that each comes after what it needs; ties in order of declaration.
        self.order: list[str] = []
        sorter = TopologicalSorter(self.needs)
        try:
            sorter.prepare()
        except CycleError as error:
            raise ConfigError("the graph has a cycle: " + " -> ".join(error.args[1])) from None
        while free := sorted(sorter.get_ready(), key=[*self.nodes].index):
            self.order += free
            sorter.done(*free)
        #: node -> all nodes before it
        self.before: dict[str, frozenset[str]] = {}
        for name in self.order:
            needs = self.needs[name]
            self.before[name] = frozenset(needs).union(*(self.before[need] for need in needs))
        for node in self.of_kind("source", "rows", "batch", "forward"):
            if any(self.nodes[name].kind == "update" for name in self.before[node.name]):
                raise ConfigError(f"node '{node.name}' comes after the update of the models, which ends a step")

    def of_kind(self, *kinds: Kind) -> list[Node]:
        """The nodes of these kinds, each after what it waits for."""
        return [node for node in map(self.nodes.__getitem__, self.order) if node.kind in kinds]

    def _find_writers(self) -> dict[str, str]:
        writers: dict[str, str] = {}
        for node in self.nodes.values():
            if twice := [column for column in node.writes if column in writers]:
                names = ", ".join(f"'{column}'" for column in twice)
                raise ConfigError(
                    f"nodes '{writers[twice[0]]}' and '{node.name}' both write {names}: a column has one writer"
                )
            for column in node.writes:
                # A source makes new rows, so it writes its own `id` and `group`.
                if column in self.inputs and node.kind != "source":
                    raise ConfigError(f"column '{column}' is an input of the graph and is written by '{node.name}'")
                writers[column] = node.name
        return writers

    def _needs(self, node: Node) -> tuple[str, ...]:
        needs = dict.fromkeys(node.after)
        if node.kind in ("batch", "update") and ANY in node.inputs and not node.after:
            names = [*self.nodes]
            needs = dict.fromkeys(names[: names.index(node.name)])
        check_known(f"node '{node.name}' comes after", node.after, self.nodes)
        # Columns that the batch of a run may bring.
        provided = self.inputs | (_OF_PROMPTS if self.source is not None else SCHEMA.keys() | WRITTEN)
        for column, is_needed in node.reads.items():
            writer = self.writers.get(column)
            if writer is not None and node.kind != "source":
                needs[writer] = None
            elif writer not in (None, node.name):
                raise ConfigError(
                    f"source '{node.name}' reads '{column}', which '{writer}' writes: a source reads only the input"
                )
            elif is_needed and column not in provided:
                hint = nearest(column, {*self.writers, *provided})
                if column in SCHEMA and self.source is not None:
                    hint = f"prompts do not bring it, so add a node that does, before '{node.name}'"
                raise ConfigError(
                    f"node '{node.name}' reads column '{column}', which no node writes and which is not among the "
                    f"inputs of the graph: {hint}"
                )
        # All but the source itself work on its samples.
        if self.source is not None and node is not self.source:
            needs[self.source.name] = None
        return tuple(name for name in self.nodes if name in needs)

    def __eq__(self, other: object) -> bool:
        """Same structure: nodes by name, kind, columns, slot and order. Functions, tuning and the
        order in which nodes were written down are left out."""
        if not isinstance(other, Graph):
            return NotImplemented
        mine, others = ({n: set(needs) for n, needs in g.needs.items()} for g in (self, other))
        return self.nodes == other.nodes and self.inputs == other.inputs and mine == others

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Graph({' -> '.join(self.order)})"

    def __str__(self) -> str:
        """A drawing: one line a node, indented by the longest way to it, with its columns."""
        depth: dict[str, int] = {}
        for name in self.order:
            depth[name] = max((depth[need] + 1 for need in self.needs[name]), default=0)
        labels = {name: "   " * depth[name] + ("└▶ " if depth[name] else "") + name for name in self.order}
        wide = max((len(label) for label in labels.values()), default=0)
        kinds = {name: f"{node.kind} on {node.slot}" for name, node in self.nodes.items()}
        side = max((len(kind) for kind in kinds.values()), default=0)
        lines = []
        for name in self.order:
            node = self.nodes[name]
            columns = f"{', '.join(node.inputs) or '-'} ─▶ {', '.join(node.outputs) or '-'}"
            lines.append(f"{labels[name]:<{wide}}  {kinds[name]:<{side}}  {columns}")
        return "\n".join(lines)
