"""Every known case is claimed by a test, and every claim is of a known case."""

from __future__ import annotations

import casebook
import pytest

THEMES = {
    "driver-library-mismatch",
    "dkms",
    "secure-boot",
    "apt-conflicts",
    "apt-holds",
    "apt-noninteractive",
    "container-toolkit",
    "benchmark",
    "gpu-count",
    "gpu-identity",
    "gpu-lost",
    "redfish",
    "xid-detection",
    "cuda-versions",
    "cuda-layout",
    "cudnn-detection",
    "nvidia-smi-parsing",
    "mig",
    "open-vs-proprietary-module",
    "fabric-manager",
    "plan-validation",
    "rollback",
    "resume",
    "state-machine",
    "dry-run",
    "inventory",
    "ipv6",
    "locale",
    "hashing",
    "rsync-delete",
    "rsync-links-sparse",
    "nginx",
    "tar",
}


def test_each_case_has_a_theme_and_says_what_a_test_must_show() -> None:
    for case, about in casebook.known().items():
        assert about["theme"] in THEMES or about["theme"].startswith("ansible-"), case
        assert about["shows"].endswith(".") and len(about["shows"].split()) > 6, case
    assert {about["theme"] for about in casebook.known().values()} >= THEMES


@pytest.mark.parametrize("case", sorted(casebook.known()))
def test_a_case_is_claimed_by_a_test(case: str) -> None:
    """`pytest --list-cases` prints by which."""
    assert casebook.claims().get(case), f"no test carries @pytest.mark.case({case!r})"


def test_a_claim_is_of_a_known_case() -> None:
    assert set(casebook.claims()) <= set(casebook.known())
