"""The plan as pydantic models: the fixed head, and one section per phase built from the registry of providers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    create_model,
)

from gpuchange import providers
from gpuchange.providers.contract import Provider
from gpuchange.providers.types import Count, Duration, HostPattern, Name, OneOrMany, Text, refuse

NO_CHANGE = "none"
STORES = {"apt": "packages"}
"""The backup that keeps what a stack provider needs to come back, where it is not called as that one."""
Kind = Literal["one", "list", "choice"]


@dataclass(frozen=True)
class Section:
    """A top-level key that holds provider parameters.

    `one`: the parameters of `provider` itself; `list`: entries with `provider:`; `choice`: one such entry.
    A section given as a scalar sets the parameter `short`.
    """

    key: str
    phase: str
    kind: Kind
    says: str
    provider: str = ""
    short: str = ""


SECTIONS: tuple[Section, ...] = (
    Section("gpu_users", "drain", "one", "What to do with processes that still use a GPU.", "gpu_users", "policy"),
    Section("hooks", "drain", "one", "Commands before drain and after release.", "hooks"),
    Section("preflight", "preflight", "one", "Checks before anything is changed.", "host"),
    Section("record", "record", "one", "What is recorded and compared beyond the GPU stack.", "host"),
    Section("backup", "backup", "list", "Copies made while the host serves."),
    Section("drain", "drain", "list", "How a host leaves service and comes back; in order, undone in reverse."),
    Section("seal", "seal", "one", "The last record before the change.", "host"),
    Section("baseline", "baseline", "one", "Benchmark of the idle host.", "gpu", "mode"),
    Section("change", "change", "list", "Instance type, hardware or nodes; empty for a software change."),
    Section("stack", "stack", "choice", "Driver, CUDA and what goes with them."),
    Section("verify", "verify", "one", "What must hold before the host serves again.", "host"),
    Section("watch", "watch", "one", "How long a host is watched in service.", "host", "for"),
)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _slots(value: Any) -> Any:
    match = re.fullmatch(r"([1-9][0-9]{0,5})(%?)", str(value), re.ASCII)
    if match is None or (match[2] and int(match[1]) > 100):
        refuse(f"{value} is neither a number from 1 nor a percentage", "write 1, 2, … or 1% … 100%")
    return str(value) if match[2] else int(match[1])


_SLOTS_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^([1-9][0-9]?|100)%$"}]}
Slots = Annotated[int | str, BeforeValidator(_slots), WithJsonSchema(_SLOTS_SCHEMA)]
Positive = Annotated[Count, Field(ge=1)]


class Rollout(Strict):
    """How many hosts may be out of service, and when to stop."""

    max_unavailable: Slots = Field(
        default=1,
        description="Most hosts out of service at once: a number, or a percentage (rounded down, at least 1).",
    )
    canary: Count = Field(
        default=1, description="Hosts that go first, alone; the others wait until their watch is accepted. 0: none."
    )
    stop_after_failures: Positive = Field(
        default=1, description="Start no further host after so many failed or held ones."
    )
    unreachable_timeout: Duration = Field(
        default=600, description="How long to wait for a host that cannot be reached before it is held."
    )

    def max_unavailable_of(self, hosts: int) -> int:
        """How many of `hosts` may be out at once."""
        limit = self.max_unavailable
        return limit if isinstance(limit, int) else max(1, hosts * int(limit[:-1]) // 100)


class Rollback(Strict):
    """What is rolled back when a host fails."""

    on_failure: Literal["host", "change", "hold"] = Field(
        default="host",
        description="host: roll back the failed host. change: roll back every host. hold: leave it to a human.",
    )


@dataclass(frozen=True)
class Chosen:
    """A provider that the plan uses, with its parameters as JSON data."""

    provider: Provider
    params: Mapping[str, Any]


def _inventory_path(value: str) -> str:
    if "{{" in value or "{%" in value:
        refuse(f"inventory holds a template ({value}); nothing in a plan is templated", "write the path itself")
    if value.startswith("-"):
        refuse(f"inventory {value} begins with a dash", f"write ./{value}")
    return value


Source = Annotated[Text, AfterValidator(_inventory_path)]


class Plan(Strict):
    """A checked plan. Sections are read with `chosen`, the whole as JSON data with `data`."""

    version: Annotated[Literal[1], BeforeValidator(lambda value: 1 if str(value) == "1" else value)] = Field(
        description="Version of the plan format: 1."
    )
    name: Name = Field(description="Name of the change; part of its id.")
    reason: Text = Field(description="Why; shown wherever a host is taken out of service.")
    ticket: Text | None = Field(default=None, description="Ticket that asks for the change.")
    inventory: Annotated[tuple[Source, ...], OneOrMany()] = Field(
        default=(), description="Ansible inventory, relative to the plan; -i on the command line wins."
    )
    hosts: Annotated[tuple[HostPattern, ...], Field(min_length=1), OneOrMany()] = Field(
        description="Ansible host patterns: which hosts are changed."
    )
    rollout: Rollout = Field(default=Rollout(), description="How many hosts at once, and when to stop.")
    rollback: Annotated[
        Rollback, BeforeValidator(lambda value: {"on_failure": value} if isinstance(value, str) else value)
    ] = Field(default=Rollback(), description="What is rolled back when a host fails.")
    _source: str = PrivateAttr("")

    @property
    def data(self) -> dict[str, Any]:
        """The plan as JSON data, defaults filled in; `from_data` takes it back."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @property
    def source(self) -> str:
        """The file that the plan was read from; empty if it was none."""
        return self._source

    def inventory_sources(self) -> list[str]:
        """The plan's inventory arguments; relative paths start at the plan's directory."""
        base = Path(self._source).parent
        return [text if "," in text else str(base / text) for text in self.inventory]

    def chosen(self, phase: str) -> tuple[Chosen, ...]:
        """The providers of `phase` in the order in which they are applied, implied ones included."""
        return _CHOOSERS.get(phase, _sections)(self, phase)


def _params(plan: Plan, section: Section, index: int | None = None) -> Chosen | None:
    part = getattr(plan, section.key, None)
    if index is not None and part is not None:
        part = part[index]
    if part is None:
        return None
    data = part.model_dump(mode="json", by_alias=True, exclude_none=True)
    name = section.provider or data.pop("provider")
    provider = providers.find(section.phase, name)
    return Chosen(provider, data) if provider else None


def _section(plan: Plan, key: str) -> tuple[Chosen, ...]:
    section = next(row for row in SECTIONS if row.key == key)
    part = getattr(plan, key, None)
    indexes: list[int | None] = list(range(len(part or ()))) if section.kind == "list" else [None]
    return tuple(chosen for index in indexes if (chosen := _params(plan, section, index)))


def _sections(plan: Plan, phase: str) -> tuple[Chosen, ...]:
    return tuple(chosen for row in SECTIONS if row.phase == phase for chosen in _section(plan, row.key))


def _implied(phase: str, name: str) -> tuple[Chosen, ...]:
    provider = providers.find(phase, name)
    if provider is None:
        return ()
    return (Chosen(provider, provider.params().model_dump(mode="json", by_alias=True, exclude_none=True)),)


def _preflight(plan: Plan, phase: str) -> tuple[Chosen, ...]:
    """The host's own checks, then those that drain, change and stack providers bring under their own names."""
    bringing = _section(plan, "drain") + _section(plan, "change") + _section(plan, "stack")
    names = [row.provider.name for row in bringing] + ["peer"] * bool(_peer(plan))
    return _sections(plan, phase) + tuple(extra for name in names for extra in _implied(phase, name))


def _backup(plan: Plan, phase: str) -> tuple[Chosen, ...]:
    """What is listed, and the old packages or installer if a stack is changed: rolling back must need no network."""
    listed = _section(plan, "backup")
    names = [STORES.get(row.provider.name, row.provider.name) for row in _section(plan, "stack")]
    wanted = [name for name in names if all(row.provider.name != name for row in listed)]
    return listed + tuple(extra for name in wanted for extra in _implied(phase, name))


def _drain(plan: Plan, _phase: str) -> tuple[Chosen, ...]:
    """Hooks around everything, then what is listed, then the processes that still use a GPU."""
    hooks = tuple(row for row in _section(plan, "hooks") if any(row.params.values()))
    return hooks + _section(plan, "drain") + _section(plan, "gpu_users")


def _baseline(plan: Plan, phase: str) -> tuple[Chosen, ...]:
    return tuple(row for row in _sections(plan, phase) if row.params.get("mode") != "skip")


def _verify(plan: Plan, phase: str) -> tuple[Chosen, ...]:
    """The host itself, then its cards' speed if something measures it, stress and another host if asked for."""
    host = _sections(plan, phase)
    speed = providers.find(phase, "gpu")
    asked = {
        key: value for row in host for key, value in row.params.items() if speed and key in speed.params.model_fields
    }
    if speed is None or not (_baseline(plan, "baseline") or asked.get("stress")):
        return host + _peer(plan)
    return (*host, Chosen(speed, asked), *_peer(plan))


def _peer(plan: Plan) -> tuple[Chosen, ...]:
    """The test with another host, if `verify` asks for one."""
    provider = providers.find("verify", "peer")
    given = [row.params["peer"] for row in _section(plan, "verify") if row.params.get("peer")]
    return tuple(Chosen(provider, params) for params in given if provider)


_CHOOSERS = {"preflight": _preflight, "backup": _backup, "drain": _drain, "baseline": _baseline, "verify": _verify}


@lru_cache(maxsize=8)
def document(registry: tuple[Provider, ...]) -> type[Plan]:
    """The model of a whole plan over the providers in `registry`."""
    fields: dict[str, Any] = {row.key: field for row in SECTIONS if (field := _field(row, registry))}
    return create_model("Plan", __base__=Plan, __doc__="A plan of gpuchange.", **fields)


def _field(section: Section, registry: tuple[Provider, ...]) -> tuple[Any, Any] | None:
    rows = tuple(row for row in registry if row.phase == section.phase)
    if section.kind == "one":
        model = next((row.params for row in rows if row.name == section.provider), None)
        return (_short(section, model), _default(section, model)) if model else None
    own_keys = {row.provider for row in SECTIONS if row.phase == section.phase and row.kind == "one"}
    entry: Any = _entry(section, tuple(row for row in rows if row.name not in own_keys))
    if section.kind == "choice":
        return entry | None, Field(default=None, description=section.says)
    return tuple[entry, ...], Field(default=(), description=section.says)


def _short(section: Section, model: type[BaseModel]) -> Any:
    if not section.short:
        return model
    return Annotated[model, BeforeValidator(lambda value: {section.short: value} if isinstance(value, str) else value)]


def _default(section: Section, model: type[BaseModel]) -> Any:
    try:
        return Field(model(), description=section.says)
    except ValidationError:
        return Field(description=section.says)


def _entry(section: Section, rows: tuple[Provider, ...]) -> Any:
    """The union of a section's entries, told apart by `provider`."""
    models: list[Any] = [_tagged(section.phase, row.name, row.params, row.does) for row in rows]
    if section.key == "change":
        models.append(_tagged(section.phase, NO_CHANGE, Strict, "Change nothing but the stack."))
    if not models:
        return Annotated[Any, BeforeValidator(lambda _value: refuse(f"there is no provider for {section.key}"))]
    if len(models) == 1:
        return models[0]
    union: Any = reduce(or_, models)
    return Annotated[union, Field(discriminator="provider")]


def _tagged(phase: str, name: str, base: type[BaseModel], does: str) -> type[BaseModel]:
    kind: Any = Literal[name]
    fields: dict[str, Any] = {"provider": (kind, Field(description=does))}
    return create_model(f"{phase}_{name}", __base__=base, __doc__=does, **fields)
