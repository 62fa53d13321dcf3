"""What needs dnf's own library: looking at its repositories, simulating, fetching and one transaction. Self-contained.

Copied to the host and run with the Python of its dnf: gpuchange_dnf_unit.py JOB.json, which prints one line of JSON.
Jobs: {do: offer | marked | simulate | fetch | transact, cache, root, ...}, see the functions of these names. `install`
is {name: [epoch:]version-release}; with `files` the packages come from those files alone, without a repository.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

try:
    import dnf
    import dnf.exceptions
except ImportError:  # an Ansible module only reads this file, with a Python that may have no dnf
    dnf = None


def open_base(job: dict[str, Any]) -> dnf.Base:
    """dnf as the host has configured it, with a cache of our own, and with no plugin to change what is resolved."""
    base = dnf.Base()
    conf = base.conf
    conf.read()
    if job.get("root"):
        conf.installroot = job["root"]
        conf.reposdir = [job["root"] + "/etc/yum.repos.d"]
    conf.cachedir, conf.logdir = job["cache"], job["cache"]
    conf.assumeyes, conf.install_weak_deps, conf.clean_requirements_on_remove = True, False, False
    conf.substitutions.update_from_etc(conf.installroot)
    if not conf.releasever:
        conf.releasever = "unknown"  # no package says which release this is; repositories may not ask for it then
    offline = "files" in job
    if not offline:
        base.read_all_repos()
        for repo in base.repos.iter_enabled():
            repo.skip_if_unavailable = False
    base.fill_sack(load_system_repo=True, load_available_repos=not offline)
    base.local_packages = base.add_remote_rpms(job["files"], strict=True) if offline else []
    return base


def evr(package: Any) -> str:
    """As rpm writes it: 3:570.172.08-1.el9; an epoch of 0 is not said."""
    epoch = "%s:" % package.epoch if int(package.epoch or 0) else ""
    return "%s%s-%s" % (epoch, package.version, package.release)


def offered(base: dnf.Base) -> list[Any]:
    return list(base.local_packages) or list(base.sack.query().available())


def offer(job: dict[str, Any]) -> dict[str, Any]:
    """{packages: [{name, version, arch, size, installed_size, repo}], unsure: repositories without signature check}."""
    base = open_base(job)
    rows = [
        {
            "name": package.name,
            "version": evr(package),
            "arch": package.arch,
            "size": package.downloadsize,
            "installed_size": package.installsize,
            "repo": package.reponame,
        }
        for package in base.sack.query().available()
        if package.name.startswith(tuple(job["prefixes"]))
    ]
    return {"packages": rows}


def resolve(base: dnf.Base, job: dict[str, Any]) -> list[dict[str, str]]:
    """Settle the transaction for `install` and `remove`; its moves {name, from, to}. Raises dnf's errors."""
    doubles = [package for package in base.sack.query().installed().duplicated() if package.name in job["install"]]
    for package in doubles:
        if evr(package) != job["install"][package.name]:
            base.package_remove(package)  # an interrupted transaction has left the old one beside the new
    for name, version in sorted(job["install"].items()):
        if any(package.name == name and evr(package) == version for package in base.sack.query().installed()):
            continue
        found = [package for package in offered(base) if package.name == name and evr(package) == version]
        if not found:
            raise dnf.exceptions.Error("%s %s is not offered" % (name, version))
        base.package_install(found[0], strict=True)
    for name in job["remove"]:
        if base.sack.query().installed().filterm(name=name):
            base.remove(name)
    base.resolve(allow_erasing=bool(job["remove"] or doubles))
    came = {package.name: evr(package) for package in base.transaction.install_set}
    went = {package.name: evr(package) for package in base.transaction.remove_set}
    names = sorted(set(came) | set(went))
    return [{"name": name, "from": went.get(name, ""), "to": came.get(name, "")} for name in names]


def marked(job: dict[str, Any]) -> dict[str, Any]:
    """{auto: names that are there only because something else needed them}."""
    base = open_base({**job, "files": []})
    wanted = {package.name for package in base.iter_userinstalled()}
    return {"auto": sorted({package.name for package in base.sack.query().installed()} - wanted)}


def simulate(job: dict[str, Any]) -> dict[str, Any]:
    return {"moves": resolve(open_base(job), job)}


def fetch(job: dict[str, Any]) -> dict[str, Any]:
    """Put the packages `wanted` ([[name, version]]) into `store`: {files: {"name=version": path}, unsigned: [...]}."""
    base = open_base(job)
    wanted = {(name, version) for name, version in job["wanted"]}
    found = {}
    for package in base.sack.query().available():
        if (package.name, evr(package)) in wanted:
            found.setdefault((package.name, evr(package)), package)
    base.conf.destdir = job["store"]
    base.download_packages(list(found.values()))
    unsigned, files = [], {}
    for key, package in found.items():
        result, why = base.package_signature_check(package)
        if result:
            unsigned.append("%s %s: %s" % (key[0], key[1], why))
        files["%s=%s" % key] = package.localPkg()
    return {"files": files, "unsigned": unsigned}


def transact(job: dict[str, Any]) -> dict[str, Any]:
    """The one transaction, from `files` alone. What came along as a dependency before stays marked so (`auto`)."""
    import libdnf.transaction

    base = open_base(job)
    moves = resolve(base, job)
    for item in base.transaction:
        if item.name in job["auto"]:
            item.reason = libdnf.transaction.TransactionItemReason_DEPENDENCY
    drift = sorted({move["name"] for move in moves} - set(job["install"]) - set(job["remove"]))
    if drift:
        raise dnf.exceptions.Error("the host has moved since preflight: %s would change too" % ", ".join(drift))
    if moves:
        base.do_transaction()
    return {"moves": moves}


JOBS = {"offer": offer, "marked": marked, "simulate": simulate, "fetch": fetch, "transact": transact}


def main(path: str) -> int:
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    out = os.dup(1)
    os.dup2(2, 1)  # scriptlets and progress write to the log; the answer stands alone
    try:
        answer = JOBS[job["do"]](job)
    except (dnf.exceptions.Error, OSError, ValueError) as error:
        answer = {"error": " ".join(str(error).split())[:1500] or type(error).__name__}
    if job.get("answer"):
        with open(job["answer"], "w", encoding="utf-8") as file:
            json.dump(answer, file)
    os.write(out, (json.dumps(answer) + "\n").encode())
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
