"""`gpuchange lab`: the verbs of the simulated fleet."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gpuchange.errors import GpuchangeError, UsageError
from gpuchange.lab import Host, Lab, cards, faults, fleet, hosts, pool, state
from gpuchange.lab.load import Load

name_option = click.option("--name", default="lab", show_default=True, envvar="GPUCHANGE_LAB", help="Which lab.")


@click.group()
def lab() -> None:
    """A fleet of real hosts on this machine, to learn, test and rehearse on."""


@lab.command()
@name_option
@click.option("--hosts", "count", default=3, show_default=True, help="GPU hosts; one load balancer comes on top.")
@click.option("--gpus", default=2, show_default=True, help="GPU cards in each.")
@click.option("--install-tools", is_flag=True, help="Install missing tools with apt-get first.")
def up(name: str, count: int, gpus: int, install_tools: bool) -> None:
    """Build (first time only) and start a lab."""
    began = time.monotonic()
    made = Lab.up(name, count, gpus, say=_say, install_tools=install_tools)
    click.echo(f"lab {name} is up after {time.monotonic() - began:.1f} s: {', '.join(h.name for h in made.hosts)}")
    click.echo(f"inventory:      {made.inventory}\nload balancer:  {made.lb_url}")
    click.echo(f"next:           gpuchange lab status --name {name}")


@lab.command()
@click.option("--install-tools", is_flag=True, help="Install missing tools with apt-get first.")
def build(install_tools: bool) -> None:
    """Build the images only; `up` does it too when they are missing."""
    fleet.build(say=_say, install_tools=install_tools)
    click.echo(f"images are ready in {pool.pool_file()}")


def _say(line: str) -> None:
    click.echo(line, err=True)


@lab.command()
@name_option
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def status(name: str, as_json: bool) -> None:
    """Every host's power, cable, freezer, staged faults, and whether it is in service."""
    opened = Lab.load(name)
    rows = {host.name: _row(host, found) for host, found in _with_status(opened)}
    if as_json:
        click.echo(json.dumps({"version": 1, "name": name, "url": opened.lb_url, "hosts": rows}))
        return
    for host, row in rows.items():
        click.echo(_status_line(host, row))


def _with_status(opened: Lab) -> list[tuple[Host, dict[str, Any]]]:
    found = opened.status()["hosts"]
    try:
        serving = opened.serving()
    except (GpuchangeError, OSError):  # the load balancer is off or hangs
        serving = {}
    return [(host, {**found[host.name], "service": serving.get(host.name, "")}) for host in opened.hosts]


def _row(host: Host, found: dict[str, Any]) -> dict[str, Any]:
    return {"address": host.address, **found, "faults": host.staged_faults()}


def _status_line(host: str, row: dict[str, Any]) -> str:
    marks = [word for word, shown in (("frozen", row["frozen"]), ("unplugged", not row["plugged"])) if shown]
    told = " ".join([*marks, *(f"fault:{fault}" for fault in row["faults"])])
    return f"{host:8} {row['address']:15} {row['power']:4} {row['service']:6} boots {row['boots']:<3} {told}".rstrip()


@lab.command()
@name_option
@click.option("--all", "every", is_flag=True, help="Every lab of this machine.")
@click.option("--purge", is_flag=True, help="Remove the cached images too.")
def down(name: str, every: bool, purge: bool) -> None:
    """End a lab and remove everything it made."""
    names = [spec.name for spec in state.all_labs()] if every else [name] if state.exists(name) or not purge else []
    for each in names:
        Lab.load(each).down()
        click.echo(f"lab {each} is gone")
    if purge:
        fleet.purge()
        click.echo(f"cached images are gone from {state.root()}")
    elif pool.pool_file().exists():
        click.echo(f"kept: {pool.pool_file()} with the built images (remove it with: gpuchange lab down --purge)")


@lab.command("break")
@name_option
@click.argument("host")
@click.argument("fault")
def break_(name: str, host: str, fault: str) -> None:
    """Stage a fault on a host; FAULT `list` shows them all."""
    if fault == "list":
        _list_faults()
        return
    Lab.load(name).host(host).break_(fault)
    click.echo(f"{host}: {fault} staged; undo it with: gpuchange lab mend {host} {fault} --name {name}")


@lab.command()
@name_option
@click.argument("host")
@click.argument("fault", required=False)
def mend(name: str, host: str, fault: str | None) -> None:
    """Undo a fault, or all that are staged on the host."""
    target = Lab.load(name).host(host)
    mended = [fault] if fault else faults.staged(target)
    for each in mended:
        target.mend(each)
    click.echo(f"{host}: mended {', '.join(mended)}" if mended else f"{host}: no fault is staged")


@lab.command("faults")
def faults_() -> None:
    """List the faults that can be staged."""
    _list_faults()


def _list_faults() -> None:
    for name, fault in faults.catalogue().items():
        click.echo(f"{name:22} {fault.summary}")


@lab.command()
@name_option
@click.option("--list", "_list", is_flag=True, hidden=True)
@click.option("--host", "one", default=None, hidden=True)
def inventory(name: str, _list: bool, one: str | None) -> None:
    """Print the lab as an Ansible dynamic inventory (JSON)."""
    listing = hosts.inventory(state.load(name))
    click.echo(json.dumps(listing["_meta"]["hostvars"].get(one, {}) if one else listing, indent=1))


@lab.command(context_settings={"ignore_unknown_options": True})
@name_option
@click.argument("host")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def ssh(name: str, host: str, command: tuple[str, ...]) -> None:
    """Open a shell on a host, or run a command there."""
    line = Lab.load(name).host(host).ssh(*command)
    os.execvp(line[0], line)


@lab.command()
@name_option
@click.argument("host")
@click.argument("switch", type=click.Choice(["on", "off", "cut", "cycle"]))
def power(name: str, host: str, switch: str) -> None:
    """Power a host on or off, as its BMC would (off = shutdown, cut = at once)."""
    Lab.load(name).host(host).power(switch)  # type: ignore[arg-type]
    click.echo(f"{host}: {switch}")


@lab.command()
@name_option
@click.argument("host")
@click.option("--pull", metavar="SLOT", help="Take the card out of this slot (PCI bus, such as 1b).")
@click.option("--put", metavar="SLOT", help="Put a card into this slot; needs --serial.")
@click.option("--serial", help="Which card: a pulled one is found again, any other is new.")
@click.option("--width", type=int, help="It trains its link at this width only.")
@click.option("--vbios", help="It has this video BIOS.")
def card(
    name: str, host: str, pull: str | None, put: str | None, serial: str | None, width: int | None, vbios: str | None
) -> None:
    """Show a host's cards; pull and put cards while its power is off."""
    target = Lab.load(name).host(host)
    if put and not serial:
        raise UsageError("which card is put in?", remedy="give --serial SERIAL")
    if pull:
        cards.pull(target, pull)
    if put and serial:
        odd = {key: value for key, value in (("link_width", width), ("vbios", vbios)) if value is not None}
        cards.put(target, put, serial, **odd)
    for each in cards.cards(target):
        click.echo(f"{host} slot {cards.bus(each)}  {each['uuid']}  serial {each['serial']}  x{each['link_width']}")


@lab.command()
@click.option("--url", required=True, help="For example http://10.88.1.10")
@click.option("--rate", default=60.0, show_default=True, help="Small requests a second.")
@click.option("--stream-every", default="2s", show_default=True, help="Start a 5 s stream this often; 0s = never.")
@click.option("--seconds", type=float, default=None, help="Stop after this many seconds.")
@click.option("--until-file", type=click.Path(path_type=Path), default=None, help="Stop once this file exists.")
@click.option("--json-into", type=click.Path(path_type=Path), default=None, help="Write the summary to this file.")
def load(
    url: str,
    rate: float,
    stream_every: str,
    seconds: float | None,
    until_file: Path | None,
    json_into: Path | None,
) -> None:
    """Send requests without retries and count the failed ones; exit 1 if there are any."""
    try:
        generator = Load(url, rate=rate, stream_every=float(stream_every.removesuffix("s")))
    except ValueError as error:
        raise UsageError(str(error), remedy="for example: --url http://10.88.1.10 --stream-every 2s") from error
    if seconds is None and until_file is None:
        raise UsageError("how long shall it run?", remedy="give --seconds N or --until-file PATH")
    summary = generator.run(_stop(seconds, until_file)).summary()
    if json_into:
        json_into.write_text(json.dumps(summary) + "\n")
    click.echo(
        f"{summary['ok']} ok, {summary['failed']} failed in {summary['seconds']} s"
        f" ({summary['per_second']}/s; streams {summary['streams_ok']} ok, {summary['streams_failed']} failed)"
    )
    click.echo(f"answered by: {summary['by_host']}")
    for reason in summary["reasons"]:
        click.echo(f"  {reason}")
    sys.exit(1 if summary["failed"] else 0)


def _stop(seconds: float | None, until_file: Path | None) -> Callable[[], bool]:
    end = time.monotonic() + seconds if seconds is not None else None
    return lambda: (end is not None and time.monotonic() >= end) or (until_file is not None and until_file.exists())


if __name__ == "__main__":
    try:
        lab(standalone_mode=True)
    except GpuchangeError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
