"""The plan file: good plans, bad plans with position and remedy, fuzz, schema."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from gpuchange import providers
from gpuchange.cli import main
from gpuchange.errors import PlanError
from gpuchange.phases import PHASES
from gpuchange.plan import Plan, from_data, json_schema, load, loads, template
from gpuchange.plan.models import SECTIONS, document

CASES = Path(__file__).parent / "cases"
BAD = sorted((CASES / "plan").glob("*.yaml"))
GOOD = sorted((CASES / "plan_good").glob("*.yaml"))
HEAD = 'version: 1\nname: cuda-12.8\nreason: "CUDA 12.8"\nhosts: [gpu_hosts]\n'


class Core(yaml.SafeLoader):
    """Reads scalars as YAML 1.2 does, and with it the editors: `on` and `no` are text."""


Core.yaml_implicit_resolvers = {
    char: [(tag, pattern) for tag, pattern in rows if tag != "tag:yaml.org,2002:bool" or char in "tTfF"]
    for char, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def as_editor_reads(text: str) -> object:
    return yaml.load(text, Loader=Core)


def names(plan: Plan, phase: str) -> list[str]:
    return [chosen.provider.name for chosen in plan.chosen(phase)]


def fault(text: str | bytes) -> PlanError:
    with pytest.raises(PlanError) as caught:
        loads(text, "plan.yaml")
    return caught.value


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_a_bad_plan_is_refused_with_position_and_remedy(path: Path) -> None:
    """case: empty-destination-becomes-root (backup-*), and every other fault that a plan can have."""
    error = fault(path.read_bytes())
    assert f"{error}\n" == path.with_suffix(".expected").read_text(encoding="utf-8")
    assert error.exit_code == 64
    for one in (error, *error.others):
        assert one.where.startswith("plan.yaml:") and one.remedy


@pytest.mark.case("empty-destination-becomes-root")
@pytest.mark.parametrize(
    ("to", "says"),
    [
        ('""', "path is empty"),
        ("", "has no value"),
        ('" "', "path is empty"),
        ('"/"', "the root directory"),
        ("backups", "not absolute"),
        ("/srv/../backup", "holds .."),
        ("/srv/models", "is inside source"),
        ("/srv/models/", "is inside source"),
        ("/srv/models/copy", "is inside source"),
        ("\"{{ undefined_var | default('') }}/\"", "nothing in a plan is templated"),
        ("[]", "a list where text belongs"),
    ],
)
def test_a_backup_goes_to_an_absolute_place_outside_of_its_source(to: str, says: str) -> None:
    error = fault(f"{HEAD}backup:\n  - provider: rsync\n    paths: [/srv/models]\n    to: {to}\n")
    assert error.where.startswith("plan.yaml:8:") and says in error.what, error


@pytest.mark.case("empty-destination-becomes-root")
def test_a_trailing_slash_means_the_same_path() -> None:
    plans = [loads(f"{HEAD}backup: [{{provider: rsync, paths: [{path}], to: /backup{end}}}]\n", "plan.yaml")
             for path, end in (("/srv/models", ""), ("/srv/models/", "/"))]  # fmt: skip
    assert plans[0].data["backup"] == plans[1].data["backup"]


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_the_command_line_says_every_fault_and_ends_with_64(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(path)]) == 64
    shown = capsys.readouterr()
    wanted = [line.split(" ")[0] for line in path.with_suffix(".expected").read_text(encoding="utf-8").splitlines()]
    places = [place.removeprefix("plan.yaml").rstrip(":") for place in wanted if place.startswith("plan.yaml")]
    assert all(f"{path}{place}" in shown.err for place in places)
    assert "Traceback" not in shown.err and shown.out == ""


def test_there_are_enough_bad_plans_and_each_has_its_expectation() -> None:
    assert len(BAD) >= 80
    assert {path.stem for path in BAD} == {path.stem for path in (CASES / "plan").glob("*.expected")}


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_good_plan_is_taken_and_survives_its_own_data(path: Path) -> None:
    plan = load(path)
    data = json.loads(json.dumps(plan.data))
    assert from_data(data).data == plan.data
    assert from_data(data).chosen("stack") == plan.chosen("stack")


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_good_plan_fits_the_schema(path: Path) -> None:
    jsonschema.Draft7Validator(json_schema()).validate(as_editor_reads(path.read_text(encoding="utf-8")))


def test_the_template_is_a_valid_plan_and_fits_the_schema() -> None:
    plan = loads(template(), "plan.yaml")
    assert names(plan, "stack") == ["apt"]
    jsonschema.Draft7Validator(json_schema()).validate(as_editor_reads(template()))


def test_every_commented_example_of_the_template_is_valid() -> None:
    lines = template().splitlines()
    examples = [line[2:] if line.startswith("# ") and ("{" in line or line.endswith(":")) else line for line in lines]
    instead = ("gpu_users: {policy: wait", "change: []")  # of these the commented line is another choice
    text = "\n".join(line for line in examples if not line.startswith(instead))
    plan = loads(text, "plan.yaml")
    assert {"hooks", "haproxy", "gpu_users"} == set(names(plan, "drain"))
    assert "rsync" in names(plan, "backup")
    assert names(plan, "change") == ["manual"]


def test_the_schema_is_draft_07_and_stands_without_null() -> None:
    schema = json_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    text = json.dumps(schema)
    assert "$defs" not in text and "discriminator" not in text and "x-unit" not in text and '"null"' not in text


@pytest.mark.parametrize(
    "part",
    [
        "rolout: {}",
        "rollout: {canary: -1}",
        "rollback: hosts",
        "watch: {for: 30}",
        "stack: {provider: apt, cuda: 12.8}",
    ],
)
def test_the_schema_refuses_what_the_plan_refuses(part: str) -> None:
    text = HEAD + part
    assert fault(text)
    assert not jsonschema.Draft7Validator(json_schema()).is_valid(as_editor_reads(text))


def test_every_default_of_the_schema_is_valid_itself() -> None:
    def defaults(node: object) -> Iterator[dict[str, object]]:
        if isinstance(node, dict):
            if "default" in node and "type" in node:
                yield node
            for value in node.values():
                yield from defaults(value)
        elif isinstance(node, list):
            for value in node:
                yield from defaults(value)

    found = list(defaults(json_schema()))
    assert found
    for node in found:
        jsonschema.Draft7Validator(node).validate(node["default"])


def test_every_key_has_a_description() -> None:
    def models(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
        from gpuchange.plan.faults import _models

        if model not in seen:
            seen.add(model)
            yield model
            for field in model.model_fields.values():
                for inner in _models(field.annotation):
                    yield from models(inner, seen)

    for model in models(document(providers.PROVIDERS), set()):
        assert [name for name, field in model.model_fields.items() if not field.description] == [], model.__name__


def test_every_provider_belongs_to_a_phase_and_to_a_section() -> None:
    phases = {phase.name for phase in PHASES}
    assert {row.phase for row in SECTIONS} | {"release"} == phases
    keys = [(row.phase, row.name) for row in providers.PROVIDERS]
    assert len(keys) == len(set(keys))
    assert {phase for phase, _ in keys} <= phases


def test_every_phase_can_be_played_with_the_shortest_plan() -> None:
    plan = loads(HEAD, "plan.yaml")
    assert names(plan, "preflight") == ["host"]
    assert names(plan, "drain") == ["gpu_users"]
    assert names(plan, "stack") == names(plan, "change") == names(plan, "backup") == []
    assert names(plan, "record") == names(plan, "seal") == names(plan, "watch") == ["host"]
    assert names(plan, "verify") == ["host", "gpu"]


def test_implied_providers_stand_where_they_belong() -> None:
    text = (
        HEAD
        + """
hooks: {before_drain: [{command: [/bin/true], on: controller}]}
backup: [{provider: rsync, paths: [/srv/models], to: /var/backups/gpuchange}]
drain: [{provider: haproxy, balancers: [lb], backend: gpu}]
change: [{provider: none}]
stack: {provider: apt, driver: "570.172.08"}
baseline: skip
"""
    )
    plan = loads(text, "plan.yaml")
    assert names(plan, "drain") == ["hooks", "haproxy", "gpu_users"]
    assert names(plan, "backup") == ["rsync", "packages"]
    assert names(plan, "preflight") == ["host", "haproxy", "apt"]
    assert names(plan, "change") == names(plan, "baseline") == []
    assert names(plan, "verify") == ["host"]  # nothing to compare with
    assert plan.chosen("stack")[0].params["driver"] == "570.172.08"
    assert "provider" not in plan.chosen("stack")[0].params


def test_scalars_are_never_misread() -> None:
    text = """
version: 1
name: 0777
reason: no
ticket: 1:30:00
hosts: [2001:db8::10, on, 0x1F]
rollout: {unreachable_timeout: 1h30m, max_unavailable: 25%}
"""
    plan = loads(text, "plan.yaml")
    assert (plan.name, plan.reason, plan.ticket) == ("0777", "no", "1:30:00")
    assert plan.hosts == ("2001:db8::10", "on", "0x1F")
    assert plan.rollout.unreachable_timeout == 5400


def test_templates_in_reason_and_ticket_are_data() -> None:
    plan = loads(HEAD.replace('"CUDA 12.8"', "\"{{ lookup('pipe', 'id') }}\""), "plan.yaml")
    assert plan.reason == "{{ lookup('pipe', 'id') }}"


@pytest.mark.parametrize(
    ("limit", "hosts", "slots"), [("1", 50, 1), ("3", 50, 3), ("25%", 50, 12), ("25%", 3, 1), ("100%", 7, 7)]
)
def test_max_unavailable_rounds_down_but_never_to_none(limit: str, hosts: int, slots: int) -> None:
    plan = loads(f"{HEAD}rollout: {{max_unavailable: {limit}}}", "plan.yaml")
    assert plan.rollout.max_unavailable_of(hosts) == slots


def test_a_plan_cannot_be_changed() -> None:
    plan = loads(HEAD, "plan.yaml")
    with pytest.raises(ValueError, match="frozen"):
        plan.name = "other"  # type: ignore[misc]


def test_short_forms_say_the_same() -> None:
    short = loads(HEAD + "gpu_users: stop\nbaseline: required\nrollback: hold\nwatch: 30s\n", "plan.yaml")
    full = loads(
        HEAD
        + "gpu_users: {policy: stop}\nbaseline: {mode: required}\nrollback: {on_failure: hold}\nwatch: {for: 30s}\n",
        "plan.yaml",
    )
    assert short.data == full.data


def test_the_inventory_is_relative_to_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(HEAD + "inventory: [hosts.ini, 'gpu-01,', /etc/hosts.ini]\n")
    assert load(path).inventory_sources() == [str(tmp_path / "hosts.ini"), "gpu-01,", "/etc/hosts.ini"]


def test_a_bom_and_windows_line_ends_are_accepted_and_positions_stay_right() -> None:
    assert loads(b"\xef\xbb\xbf" + HEAD.replace("\n", "\r\n").encode(), "plan.yaml").name == "cuda-12.8"
    assert fault(b"\xef\xbb\xbfversio: 1\r\n").where == "plan.yaml:1:1"
    assert fault("\ufeff" + HEAD.replace("\n", "\r\n") + "rolout: 1\r\n").where == "plan.yaml:5:1"


def test_a_large_file_is_refused_before_it_is_read() -> None:
    assert "bytes" in fault("#" * 300_000).what


def test_an_alias_bomb_is_refused_quickly() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
    assert "aliases" in fault(HEAD + bomb).what


def test_an_alias_that_stays_small_is_allowed() -> None:
    plan = loads(HEAD + "rollout: {unreachable_timeout: &t 5m}\ngpu_users: {policy: wait, timeout: *t}\n", "plan.yaml")
    assert plan.rollout.unreachable_timeout == 300


def test_faults_of_one_key_are_not_repeated_and_come_in_the_order_of_lines() -> None:
    error = fault("hosts:\nname: /\nversion: 1\n")
    assert [one.where for one in (error, *error.others)] == ["plan.yaml:1:1", "plan.yaml:1:7", "plan.yaml:2:7"]


@pytest.mark.parametrize("path", ["/nonexistent/plan.yaml", "/", "a\0b"])
def test_a_file_that_cannot_be_read_is_a_plan_error(path: str) -> None:
    with pytest.raises(PlanError) as caught:
        load(path)
    assert caught.value.remedy


def test_stored_data_of_another_format_is_refused() -> None:
    with pytest.raises(PlanError, match="stored plan"):
        from_data({"version": 1, "name": "a", "reason": "b", "hosts": ["c"], "later": True})


KEYS = [row.key for row in SECTIONS] + [
    "version",
    "name",
    "reason",
    "hosts",
    "rollout",
    "provider",
    "<<",
    "timeout",
    "for",
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.dates(),
    st.binary(max_size=4),
    st.sampled_from(KEYS),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=25,
)


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text(alphabet="abc:-[]{}&*!|>'\"#%@`,?~<= \n\t0.\\xuU"))
def test_any_text_gives_a_plan_error(text: str) -> None:
    fault(text)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_plan_error(content: bytes) -> None:
    fault(content)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), TREES, max_size=6))
def test_any_yaml_below_a_good_head_gives_a_plan_or_a_plan_error(tree: dict[str, object]) -> None:
    text = yaml.safe_dump({"version": 1, "name": "a", "reason": "b", "hosts": ["c"], **tree}, allow_unicode=True)
    try:
        plan = loads(text, "plan.yaml")
    except PlanError as error:
        assert all(one.where.startswith("plan.yaml:") and one.remedy for one in (error, *error.others))
    else:
        assert from_data(json.loads(json.dumps(plan.data))).data == plan.data


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_plan_gives_a_plan_or_a_plan_error(data: st.DataObject) -> None:
    text = template()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 6))
        text = text[:at] + data.draw(st.text(alphabet="{}[]:,-*&!\"'\n \t%|>0\\", max_size=4)) + text[at + cut :]
    try:
        loads(text, "plan.yaml")
    except PlanError as error:
        assert error.where.startswith("plan.yaml:")


def test_the_template_proposes_a_driver_branch_that_lives_longest() -> None:
    from gpuchange.compat.driver_rules import branch
    from gpuchange.compat.tables import known_branches

    driver = loads(template(), "plan.yaml").data["stack"]["driver"]
    lives = known_branches()[branch(driver)]
    assert lives["type"] == "LTSB" and lives["eol"] >= "2028"


def test_a_pipe_is_no_plan(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan")
    with pytest.raises(PlanError, match="a plan is a file, not a pipe"):
        load(tmp_path / "plan")
