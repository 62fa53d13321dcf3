"""A plan is data: templates, options, bombs and paths in it run nothing and reach nothing outside their place."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hostcode import library
from test_player import build, request

from gpuchange import player
from gpuchange.change import Connection, create
from gpuchange.errors import GpuchangeError, PlanError
from gpuchange.phases import PHASES
from gpuchange.plan import loads
from gpuchange.providers.contract import HostView
from gpuchange.reports import Reported
from reliability.figures import Effort, Figures, Row
from reliability.material import GOOD, as_text, evidence, put, text_positions

ROW = Row(
    "A plan is data: nothing in it is run on the controller, and nothing is written outside the paths it names",
    peer="ansible-runner: a lookup in an extra variable runs a command on the controller",
    source="ansible-runner 2.4.3, extravars; shown by this test",
)
PARTS = 50  # of one report: ansible-runner drops events of more than 700,000 characters
_ = library  # the path of module_utils is set by importing hostcode


def injections(canary: Path) -> tuple[str, ...]:
    """Text that would create `canary` if anything on the way took it for more than text."""
    touch = f"touch {canary}"
    return (
        f"{{{{ lookup('pipe', '{touch}') }}}}",
        f"{{% set x = lookup('pipe', '{touch}') %}}x",
        f"{{{{ cycler.__init__.__globals__.os.system('{touch}') }}}}",
        f"$({touch})",
        f"`{touch}`",
        f"; {touch} #",
        f"-oProxyCommand={touch}",
        f"| {touch}",
        f"{{# #}}{{{{ query('pipe', '{touch}') }}}}",
        f"x\n- hosts: localhost\n  tasks: [{{command: {touch}}}]",
        f"!unsafe {{{{ lookup('pipe', '{touch}') }}}}",
        f"${{{touch}}}",
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("content"))


def shipped(text: str) -> Iterator[tuple[str, dict[str, object]]]:
    """For every step of an accepted plan: (phase/provider, the arguments that its plays get)."""
    plan = loads(text, "plan.yaml")
    for phase in PHASES:
        for chosen in plan.chosen(phase.do.phase):
            for direction in ("do", "undo"):
                view = HostView("a", plan.data, chosen.params, direction=direction)  # type: ignore[arg-type]
                yield f"{phase.name}/{chosen.provider.name}", {"args": _args(chosen.provider, view), "plan": plan.data}


def _args(provider: object, view: HostView) -> object:
    try:
        return provider.args(view, "apply")
    except (KeyError, StopIteration, TypeError):  # needs what earlier steps reported
        return {"params": dict(view.params)}


def injected(canary: Path, effort: Effort) -> Iterator[str]:
    """Every text at every string position of the good plans; in the short form two at each, in turn."""
    texts = injections(canary)
    for path in GOOD:
        data = as_text(path)
        for number, at in enumerate(text_positions(data)):
            some = [texts[(2 * number + more) % len(texts)] for more in (0, 1)]
            yield from (put(data, at, text) for text in (texts if effort.full else some))


def accepted(text: str, figures: Figures) -> list[tuple[str, dict[str, object]]]:
    """What an accepted plan sends to hosts; nothing for a refused one."""
    figures.tried += 1
    try:
        return list(shipped(text))
    except PlanError:
        figures.count(refused=1)
        return []


def test_no_text_of_a_plan_is_run_on_its_way_through_ansible(
    place: Path, tmp_path: Path, effort: Effort, figures: Figures
) -> None:
    """Every string position; what is accepted goes through the real player to a module and comes back unchanged."""
    canary = tmp_path / "pwned"
    payload = [args for text in injected(canary, effort) for args in accepted(text, figures)]
    if canary.exists():
        figures.broken.append("loading a plan ran something")
    unique = {json.dumps(args, sort_keys=True, default=str): args for _, args in payload}
    chosen = list(unique.values())
    sample = chosen if effort.full else random.Random(effort.seed).sample(chosen, min(100, len(chosen)))
    figures.count(played=len(sample))
    for part in range(0, len(sample), PARTS):
        sent = {"parts": sample[part : part + PARTS]}
        play = player.Play(request(place, "apply", {"a": sent}), tmp_path / "artifacts")
        found = evidence(play)
        if not isinstance(found[0], Reported) or found[0].report["args"] != json.loads(json.dumps(sent, default=str)):
            figures.broken.append(f"did not come back as it was sent: {str(found)[:500]}")
    if canary.exists():
        figures.broken.append("a play ran something out of a plan")


def test_the_same_text_as_plain_extra_variables_runs(tmp_path: Path, place: Path) -> None:
    """So that the test above can fail: without our marks ansible-runner runs the first injection."""
    from test_player import plain

    canary = tmp_path / "pwned"
    args = {"a": injections(canary)[0]}
    (tmp_path / "runner").mkdir()
    plain(place, tmp_path / "runner", "apply", {"gpuchange_args": args, "gpuchange_owner": {}, "gpuchange_step": {}})
    assert canary.exists()


# -- names ------------------------------------------------------------------------------------------------------------

NAMES = (
    "-oProxyCommand=touch {c}", "--vault-id=x", "a b", "a\nb", "a\tb", "a\x1b[31m", "a\u202eb", "../x", "a/../../x",
    "a\x00b", "a\u2028b", ".", "..", "", "a\x7f", "/etc", "-", "a\rb",
)  # fmt: skip
ADDRESSES = ("-oProxyCommand=touch {c}", "x y", "x\ny", "x\x00y", "", "[::1", "-w x")
PLAN = "version: 1\nname: x\nreason: y\nhosts: [all]\n"


def tried(tmp_path: Path, number: int, hosts: dict[str, dict[str, object]]) -> GpuchangeError | None:
    """Begin a change over this inventory; the error, if it is refused."""
    own = tmp_path / f"case{number}"
    own.mkdir()
    (own / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}))
    rest = {k: v for k, v in as_text(GOOD[0]).items() if k not in ("version", "name", "reason", "hosts", "inventory")}
    rest.pop("drain", None)
    (own / "plan.yaml").write_text(PLAN + yaml.safe_dump(rest))
    try:
        create(own / "state", own / "plan.yaml", Connection(inventory=(str(own / "hosts.json"),)))
    except GpuchangeError as error:
        return error
    return None


def test_host_names_and_addresses_that_are_options_or_paths_are_refused(
    tmp_path: Path, effort: Effort, figures: Figures
) -> None:
    canary = tmp_path / "pwned"
    cases = [{name.format(c=canary): {}} for name in NAMES]
    cases += [
        {"good": {variable: address.format(c=canary)}}
        for variable in ("ansible_host", "ansible_user", "ansible_port")
        for address in ADDRESSES
    ]
    if not effort.full:
        cases = random.Random(effort.seed).sample(cases, 3)
    for number, hosts in enumerate(cases):
        figures.tried += 1
        error = tried(tmp_path, number, hosts)  # type: ignore[arg-type]
        outside = [path for path in tmp_path.iterdir() if not path.name.startswith("case")]
        if error is None or not error.remedy or outside:
            figures.broken.append(f"{hosts}: {error}; outside: {outside}")


# -- bombs ------------------------------------------------------------------------------------------------------------


def bombs() -> Iterator[tuple[str, bytes]]:
    levels = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
    yield "aliases", f"a0: &a0 [x]\n{levels}\n".encode()
    yield "a loop of aliases", b"a: &a [*a]\n"
    yield "brackets", b"[" * 200_000
    yield "braces", b"{a: " * 60_000
    yield "indentation", b"".join(b" " * n + b"a:\n" for n in range(700))
    yield "a long line", b"a: " + b"x" * 50_000_000
    yield "many keys", b"".join(b"k%d: 1\n" % n for n in range(30_000))
    yield "many documents", b"---\n" * 60_000
    yield "a tag", b"a: !!python/object/apply:os.system [id]\n"
    yield "a long anchor", b"a: &" + b"x" * 250_000 + b" 1\n"
    yield "quotes", b'a: "' + b"\\\\" * 120_000
    yield "a number", b"version: " + b"9" * 250_000
    yield "merge keys", b"a: &a {b: 1}\nc:\n" + b"  <<: *a\n" * 90
    yield "flow keys", b"? " * 100_000
    yield "zeros", bytes(200_000)
    yield "secret-like text", b"a: " + b"token_" * 40_000
    yield "comments", b"# x\n" * 60_000


def test_bombs_are_refused_soon_and_small(figures: Figures) -> None:
    import resource

    for name, content in bombs():
        began, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            loads(content, "plan.yaml")
            figures.broken.append(f"{name}: accepted")
        except PlanError:
            pass
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
        took = time.monotonic() - began
        figures.tried += 1
        if took > 15 or grown > 400:
            figures.broken.append(f"{name}: {took:.1f} s, {grown:.0f} MiB")


# -- backup paths -----------------------------------------------------------------------------------------------------


def make_set(source: Path, to: Path) -> str:
    """Make a set as the host's program does; what it refused, or ""."""
    from ansible.module_utils import gpuchange_backup, gpuchange_backup_look

    try:
        gpuchange_backup.make_set(
            {"paths": [str(source)], "to": str(to), "name": "c1", "work": str(source.parent / "work")}
        )
    except gpuchange_backup_look.Refused as error:
        return str(error)
    return ""


def laid_out(root: Path) -> tuple[Path, Path, Path]:
    """source, destination, and the directory outside that must stay as it is."""
    source, to, outside = root / "srv", root / "backup", root / "outside"
    for place in (source, to, outside):
        place.mkdir(parents=True)
    (source / "model").write_text("weights")
    (source / "link").symlink_to(outside)
    (outside / "mine").write_text("untouched")
    return source, to, outside


def plant_tree(to: Path, outside: Path) -> None:
    (to / "c1.partial").mkdir()
    (to / "c1.partial/tree").symlink_to(outside)


PLANTED = {
    "the set is a link": lambda to, outside: (to / "c1").symlink_to(outside),
    "the unfinished set is a link": lambda to, outside: (to / "c1.partial").symlink_to(outside),
    "the tree is a link": lambda to, outside: (
        (to / "c1.partial").mkdir(),
        (to / "c1.partial/tree").symlink_to(outside),
    ),
    "everybody may write": lambda to, outside: to.chmod(0o777),
    "another's directory": lambda to, outside: os.chown(to, 65534, 65534),
    "above it everybody may write": lambda to, outside: to.parent.chmod(0o777),
}


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("rsync"), reason="needs root and rsync")
@pytest.mark.parametrize("planted", PLANTED)
def test_a_backup_whose_place_others_control_is_not_made(planted: str, tmp_path: Path, figures: Figures) -> None:
    source, to, outside = laid_out(tmp_path / "host")
    PLANTED[planted](to, outside)
    refused = make_set(source, to)
    figures.tried += 1
    if not refused or sorted(os.listdir(outside)) != ["mine"]:
        figures.broken.append(f"{planted}: {refused!r}, outside: {os.listdir(outside)}")


SWAP = """
import os, sys
os.setgid(65534); os.setuid(65534)
to, outside = sys.argv[1:]
print("ready", flush=True)
while True:
    for name in ("c1.partial", "c1", "c1.partial/tree", "c1.partial/tree/new"):
        path = os.path.join(to, name)
        for act in (lambda: os.rename(path, path + ".x"), lambda: os.symlink(outside, path), lambda: os.unlink(path)):
            try:
                act()
            except OSError:
                pass
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("rsync"), reason="needs root and rsync")
def test_links_swapped_in_while_a_backup_is_made_lead_nowhere(tmp_path: Path, effort: Effort, figures: Figures) -> None:
    """Another account tries all the time to put links in the way, in a sticky directory that it may write to."""
    root = Path(tempfile.mkdtemp(dir="/tmp"))
    root.chmod(0o1777)
    try:
        source, to, outside = laid_out(root / "host")
        (root / "host").chmod(0o755)
        swapper = subprocess.Popen([sys.executable, "-c", SWAP, str(to), str(outside)], stdout=subprocess.PIPE)
        try:
            assert swapper.stdout and swapper.stdout.readline()
            for _ in range(effort.of(full=60, short=6)):
                refused = make_set(source, to)
                figures.tried += 1
                if refused or sorted(os.listdir(outside)) != ["mine"]:
                    figures.broken.append(f"{refused!r}, outside: {os.listdir(outside)}")
                shutil.rmtree(to / "c1")
        finally:
            swapper.kill()
            swapper.wait()
            assert swapper.stdout
            swapper.stdout.close()
    finally:
        shutil.rmtree(root)
