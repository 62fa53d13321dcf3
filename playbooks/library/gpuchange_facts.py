#!/usr/bin/python3
"""All that gpuchange needs to know of a GPU host, in one call: facts, hash manifest, GPU function."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_facts
short_description: Look at a GPU host
description:
  - Collects identity, space, packages, driver, cards, CUDA, cuDNN, units and GPU users within seconds. No command is
    waited for beyond its deadline; one that hangs is reported as hung.
  - With args.manifest it makes (or attaches to) the hash manifest as a host unit, and reports running until it ended.
  - With args.function it tests the cards through the CUDA driver API.
  - With args.card_settings it first sets the cards again as they were recorded, where they are not so.
  - mode undo first ends what this change still measures on the host.
  - mode probe collects the facts only and leaves no trace on the host.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args:
    type: dict
    default: {}
    description: paths, services, space, binaries, guard, backup, manifest, function, container_image, card_settings
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_facts: {mode: apply, owner: '{{ gpuchange_owner }}', args: {paths: [/srv/models]}}"
RETURN = """
report: {type: dict, returned: always, description: "facts, errors, manifest, backup, function, restored"}
"""

import time  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from typing import Any, Callable  # noqa: E402

from ansible.module_utils import gpuchange_containers, gpuchange_gpu_users, gpuchange_runfile_look  # noqa: E402
from ansible.module_utils import gpuchange_facts_gpu as gpu  # noqa: E402
from ansible.module_utils import gpuchange_facts_host as host  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_backup_unit import backup_unit  # noqa: E402
from ansible.module_utils.gpuchange_card_settings import put_back  # noqa: E402
from ansible.module_utils.gpuchange_cuda import function_test  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
    args_of,
    change_of,
    finish,
    guard,
    mode_of,
    open_module,
    owned,
)
from ansible.module_utils.gpuchange_manifest import manifest_unit  # noqa: E402
from ansible.module_utils.gpuchange_measuring import end_measuring  # noqa: E402
from ansible.module_utils.gpuchange_packages import packages_snapshot  # noqa: E402
from ansible.module_utils.gpuchange_rpm import with_rpms  # noqa: E402

MANIFEST_WAIT_S = 10.0
SMI_DEADLINE_S = 15.0
TEST_DEADLINE_S = 30.0
SPACE = ["/", "/boot", "/var/lib/gpuchange", "/var/cache/apt", "/usr/local", "/lib/modules"]


def collectors(args: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Every fact by its name in the report."""
    paths = list(args.get("paths", []))
    return {
        "identity": host.identity,
        "system": host.system,
        "clock": host.clock,
        "space": lambda: host.space(SPACE + paths + list(args.get("space", []))),
        "paths": lambda: host.paths(paths),
        "services": lambda: host.units(args.get("services", [])),
        "smi": lambda: gpu.smi(float(args.get("smi_deadline_s", SMI_DEADLINE_S))),
        "binaries": lambda: host.binaries(args.get("binaries", [])),
        "pci": gpu.pci,
        "loaded": gpu.loaded,
        "on_disk": gpu.on_disk,
        "boot": gpu.boot,
        "userspace": gpu.userspace,
        "packages": lambda: with_rpms(packages_snapshot()),
        "cuda": gpu.cuda,
        "cudnn": gpu.cudnn,
        "nccl": gpu.nccl,
        "fabric_manager": gpu.fabric_manager,
        "container_toolkit": gpu.container_toolkit,
        "containers": lambda: containers(args),
        "gpu_users": gpuchange_gpu_users.scan,
        "dkms": gpu.dkms,
        "apt_history": gpu.apt_history,
        "runfile": gpuchange_runfile_look.summary,
    }


def containers(args: dict[str, Any]) -> dict[str, Any]:
    """Running containers and whether they see the GPUs; with args.container_image, a fresh one too."""
    image = str(args.get("container_image") or "")
    return {"running": gpuchange_containers.running(), "fresh": gpuchange_containers.fresh(image) if image else None}


def collect(args: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(facts, errors): a collector that fails costs its own fact only, and says so."""
    facts: dict[str, Any] = {}
    errors: dict[str, str] = {}
    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=6) as pool:
        futures = {name: pool.submit(look) for name, look in collectors(args).items()}
        for name, future in futures.items():
            try:
                facts[name] = future.result()
            except Exception as error:  # whatever a strange host does to one collector, the others still count
                errors[name] = "%s: %s" % (type(error).__name__, error)
    facts.update(facts.pop("identity", {}))
    facts.update(facts.pop("system", {}))
    facts["collected_s"] = round(time.monotonic() - began, 3)
    return facts, errors


def final_backup(module: AnsibleModule, wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """The drained host's set beside the one made in service; only what moved since is copied and read back."""
    if not wanted or mode_of(module) == "probe":
        return None
    with owned(module):
        made = backup_unit(module, dict(wanted, final=True), change_of(module) + ".seal", MANIFEST_WAIT_S)
    if made["state"] != "done":
        finish(module, made["state"], why="final backup: " + made["why"])
    return dict(made["set"])


def main() -> None:
    module = open_module()
    args = args_of(module)
    if args.get("guard"):
        guard(module)
    if mode_of(module) == "undo":
        with owned(module):
            unit = end_measuring(module)
        if unit:
            finish(module, "running", why="%s is told to end" % unit)
    manifest = None
    backup = final_backup(module, args.get("backup"))
    if args.get("manifest") and mode_of(module) != "probe":
        with owned(module):
            manifest = manifest_unit(module, args["manifest"], wait_s=MANIFEST_WAIT_S)
        if manifest["state"] != "done":
            finish(module, manifest["state"], why=manifest["why"], progress=manifest.get("progress", {}))
    restored = []
    if args.get("card_settings") and mode_of(module) != "probe":
        with owned(module):
            restored = put_back(args["card_settings"])
    facts, errors = collect(args)
    if mode_of(module) == "probe":  # facts alone are not the step: doing it again costs little and repeats nothing
        finish(module, "not_done", facts=facts, errors=errors, machine_id=facts.get("machine_id", ""))
    summary = (manifest or {}).get("summary")
    machine_id = facts.get("machine_id", "")
    found = dict(restored=restored, facts=facts, errors=errors, machine_id=machine_id, manifest=summary, backup=backup)
    function = function_test(TEST_DEADLINE_S) if args.get("function") else None  # in a child: a driver may kill that
    finish(module, "done", **found, function=function)


if __name__ == "__main__":
    main()
