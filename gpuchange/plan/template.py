"""The plan that `gpuchange init` writes: complete, commented, valid as it is."""

from __future__ import annotations

TEMPLATE = """\
# yaml-language-server: $schema=./gpuchange.schema.json
# Check it with `gpuchange validate`, see what it would do with `gpuchange plan`, do it with `gpuchange apply`.
# Nothing in a plan is templated or run. Times carry a unit (90s, 5m, 2h, 1d); versions stand in quotes.
version: 1
name: cuda-12.8
reason: "CUDA 12.8 for the new models"     # shown wherever a host is taken out of service
# ticket: OPS-1234

# inventory: inventory.yaml                # Ansible's own; relative to this file; -i wins
hosts: [gpu_hosts]                         # Ansible host patterns

rollout:
  max_unavailable: 1                       # hosts out of service at once: a number, or 25% (rounded down, at least 1)
  canary: 1                                # goes first, alone, until its watch is over; 0: none
  stop_after_failures: 1                   # start no further host after so many failed or held ones
  unreachable_timeout: 10m                 # then the host is held: it is never undone blindly
rollback:
  on_failure: host                         # host | change (all hosts) | hold (a human decides)

# What to do with processes that still use a GPU once the host is drained: wait | refuse | stop.
# A service that holds the GPU never ends by itself: stop it, and it is started again on release.
gpu_users: {policy: wait, timeout: 5m}
# gpu_users: {policy: stop, timeout: 5m, services: [modelserver.service]}

# Commands around the outage. Idempotent, please: they may run again after a crash.
# hooks:
#   before_drain: [{command: [/usr/local/bin/silence, "on"], on: controller}]    # on: controller | host
#   after_release: [{command: [/usr/local/bin/silence, "off"], on: controller}]

preflight: {min_free: 2GiB}
# record: {paths: [/srv/models], services: [modelserver.service]}    # must be equal afterwards
#   sums: [/srv/models/SHA256SUMS]         # checksum files that others made are held against them too
#   inspect: tell                          # torn checkpoints, locks, half-written files: tell | require | skip

# Copies made while the host serves. The old packages are kept without asking.
# backup:
#   - {provider: rsync, paths: [/srv/models], to: /var/backups/gpuchange}    # tar: one archive instead

# How a host leaves service and comes back; none: nothing balances load over these hosts.
# drain:
#   - {provider: haproxy, balancers: [loadbalancers], backend: gpu, socket: /run/haproxy/admin.sock, timeout: 5m}

baseline: {mode: best_effort}              # required | best_effort | skip; command and metrics: your own benchmark
change: []                                 # nothing but the stack; or a card by hand:
# change: [{provider: manual, cards: [{goes: "0000:1b:00.0", comes: {serial: "1650000000001"}}]}]
# driver: auto, cudnn: auto: the newest that the host's package sources offer and that is known to fit its cards.
# R580 is a long-term branch: `gpuchange compat` says until when. `gpuchange lab` offers 570.172.08 instead.
stack: {provider: apt, driver: "580.95.05", cuda: "12.8.1", cudnn: "9.8.0", container_toolkit: "1.17.8"}
verify: {tolerance: 5%}                    # stress: 60s loads all cards at once before the host serves again
watch: {for: 30s}
"""


def template() -> str:
    """A commented plan with the editor modeline; it is a valid plan."""
    return TEMPLATE
