"""A stand-in for ansible-playbook whose hosts are directories: `<home>/bin/ansible-playbook` of the crash tests.

Started as ansible-runner starts the real one, it answers as the roles do: it looks for the owner marker, acts, and
reports through the event stream of ansible-runner's callback. It does *not* look before it acts: an order that comes
twice is done twice, and is seen in the host's ledger, `hosts/HOST/ledger`, one line an act (one write: there or not).

$HOME is the world: `hosts/`, and `script.json` {"HOST ROLE TASKS": "failed" | "unknown" | "silent" | waits (number)};
with "careless" in it, a probe never finds anything done, as with a tool that does not look.
Python's own library only, and little of it: this program starts some ten thousand times.
"""

import binascii
import fcntl
import json
import os
import sys
import time

READS_ONLY = ("preflight_host",)  # before any change nobody's marker is taken


def asked(arguments):
    """The extra variables of the play, as plain text; {} for a call that is no play of a change."""
    for word in arguments:
        if word.startswith("@") and word.endswith("/extravars"):
            with open(word[1:], encoding="utf-8") as file:
                return plain(json.load(file))
    return {}


def plain(value):
    if isinstance(value, dict):
        return value["__ansible_unsafe"] if "__ansible_unsafe" in value else {k: plain(v) for k, v in value.items()}
    return value


def say(event, data):
    """One event, as ansible-runner's own callback hands it over: a file, and its name in the output."""
    name = os.urandom(8).hex()
    folder = os.path.join(os.environ["AWX_ISOLATED_DATA_DIR"], "job_events")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with open(os.path.join(folder, name + "-partial.json"), "w", encoding="utf-8") as file:
        json.dump({"event": event, "uuid": name, "event_data": data}, file)
    for fact in ({"uuid": name}, {}):
        text = binascii.b2a_base64(json.dumps(fact).encode(), newline=False).decode()
        sys.stdout.write(f"\x1b[K{text}\x1b[{len(text)}D\x1b[K")
    sys.stdout.flush()


class Host:
    def __init__(self, name, variables):
        self.name, self.role, self.tasks = name, variables["gpuchange_role"], variables["gpuchange_tasks"]
        self.owner, self.step = variables["gpuchange_owner"], variables["gpuchange_step"]
        self.folder = os.path.join(os.environ["HOME"], "hosts", name)

    def lines(self):
        with open(os.path.join(self.folder, "ledger"), encoding="utf-8") as file:
            return [line.split() for line in file]

    def write(self, what):
        handle = os.open(os.path.join(self.folder, "ledger"), os.O_WRONLY | os.O_APPEND)
        os.write(handle, f"{time.monotonic_ns()} {self.role} {what}\n".encode())
        os.close(handle)

    def stands(self):
        """The last act of this role: apply, undo, or nothing yet; how often it was looked at since."""
        mine = [what for _, role, what in self.lines() if role == self.role]
        acts = [what for what in mine if what in ("apply", "undo")]
        return (acts[-1] if acts else "undo"), mine[::-1].index(acts[-1]) if acts else 0

    def shut_out(self):
        """The owner marker, compared and set as the modules do it; the foreign marker if it refuses us."""
        path = os.path.join(self.folder, "owner.json")
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
        except FileNotFoundError:
            found = self.owner
        if found["change"] != self.owner["change"] or found["fence"] > self.owner["fence"]:
            return found
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(self.owner, file)
        os.rename(path + ".new", path)
        return None

    def play(self, script):
        """(event, result) of this host's report task; None says nothing."""
        if self.role == "owner_marker":
            if os.path.exists(os.path.join(self.folder, "owner.json")):
                os.unlink(os.path.join(self.folder, "owner.json"))
            return "runner_on_ok", self.report("done")
        wanted = self.step["direction"] == "do"
        waits = script.get(f"{self.name} {self.role} apply")
        waits = waits if isinstance(waits, int) else 0
        if self.tasks == "probe":
            act, looks = self.stands()
            state = "running" if act == "apply" and looks < waits else "done"
            there = (act == "apply") == wanted and not script.get("careless")
            return "runner_on_ok", self.report(state if there else "not_done")
        refused = None if self.role in READS_ONLY else self.shut_out()
        if refused:
            return "runner_on_failed", {"msg": "owned by another", "refused": {"kind": "locked", "by": refused}}
        return self.act(waits, script.get(f"{self.name} {self.role} {self.tasks}"))

    def act(self, waits, fault):
        if fault == "failed":
            return "runner_on_failed", {"msg": "it broke"}
        act, looks = self.stands()
        if self.tasks == "apply" and waits and act == "apply":  # the work that waits was begun: this is one more look
            self.write("look")
            return "runner_on_ok", self.report("running" if looks + 1 < waits else "done")
        self.write(self.tasks)
        if fault == "silent":
            return None
        first = "running" if waits and self.tasks == "apply" else "done"
        return "runner_on_ok", self.report("unknown" if fault == "unknown" else first)

    def report(self, state):
        return {"report": {"state": state, "why": "" if state == "done" else "so it is", "machine_id": self.name}}


def main():
    variables = asked(sys.argv)
    with open(os.path.join(os.environ["HOME"], "script.json"), encoding="utf-8") as file:
        script = json.load(file)
    silent = False
    for name in variables["gpuchange_host_args"]:
        host = Host(name, variables)
        lock = os.open(host.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            host.write("overlap")  # another play acts on this host at this moment
        found = host.play(script)
        silent = silent or found is None
        if found:
            say(found[0], {"host": name, "task": "report", "res": found[1]})
        os.close(lock)
    if not silent:
        say("playbook_on_stats", {"ok": {}, "failures": {}, "dark": {}})
    sys.exit(1 if silent else 0)


if __name__ == "__main__":
    main()
