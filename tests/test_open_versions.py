"""Versions that a plan leaves open, and the tables in preflight: asked, chosen on the host, shown, kept, verified."""

from __future__ import annotations

from typing import Any

import hostcode  # noqa: F401  (puts module_utils on Ansible's path)
import pytest
from ansible.module_utils.gpuchange_apt_auto import close_open, inside
from test_checks_host import TWO_H100, patched
from test_module_apt import driver_packages, installed, offer, package

from gpuchange import plan as plans
from gpuchange.checks import compatibility, snapshot, wanted
from gpuchange.compat.resolver import fits
from gpuchange.phases import PHASES
from gpuchange.preview import build
from gpuchange.providers import facts
from gpuchange.providers.contract import HostView
from gpuchange.providers.preflight.apt import AptPreflightReport, args, judge, preview
from gpuchange.providers.preflight.host import PROVIDER as HOST
from gpuchange.providers.preflight.host import wish
from gpuchange.providers.stack.apt import args as stack_args

OPEN = {"stack": {"provider": "apt", "driver": "auto", "cuda": "12.8.1", "cudnn": "auto"}}
ALL = [["0", ""]]


def view(plan: dict[str, Any] = OPEN, host: dict[str, Any] = TWO_H100, **last: Any) -> HostView:
    return HostView("gpu1", plan, {}, last={"preflight/host": {"state": "done", "facts": host}, **last})


def report(**fields: Any) -> AptPreflightReport:
    body = {"state": "done", "after": {"driver": "570.172.08"}, "transaction": {"driver": "570.172.08"}}
    return AptPreflightReport.model_validate({**body, **fields})


def with_cards(device: str, **patch: Any) -> dict[str, Any]:
    rows = [{"address": "0000:1b:00.0", "class": "0x030200", "device": device}]
    return patched({"pci": rows, **patch})


# ---------------------------------------------------------------------------------------------- the plan


def test_driver_and_cudnn_may_be_open_nothing_else(tmp_path: Any) -> None:
    head = "version: 1\nname: a\nreason: b\nhosts: [g]\n"
    path = tmp_path / "plan.yaml"
    path.write_text(head + 'stack: {provider: apt, driver: auto, cuda: "12.8.1", cudnn: "auto"}\n')
    assert plans.load(path).data["stack"]["driver"] == plans.load(path).data["stack"]["cudnn"] == "auto"
    for text in ("cuda: auto", "nccl: auto", "container_toolkit: auto", "driver: newest"):
        path.write_text(f"{head}stack: {{provider: apt, {text}}}\n")
        with pytest.raises(plans.PlanError, match="is not a version"):
            plans.load(path)


# ------------------------------------------------------------------------------------- asked of the host


def test_the_host_is_told_which_versions_fit_its_cards_and_its_cuda() -> None:
    asked = args(view(), "apply")
    assert asked["wanted"] == {"driver": "auto", "cuda": "12.8.1", "cudnn": "auto"}
    assert inside("570.172.08", asked["fits"]["driver"]) and not inside("525.60.12", asked["fits"]["driver"])
    assert inside("9.8.0.87", asked["fits"]["cudnn"]) and not inside("9.30.0.1", asked["fits"]["cudnn"])
    volta = args(view(host=with_cards("0x1db4")), "apply")["fits"]
    assert inside("580.95.05", volta["driver"]) and not inside("590.48.01", volta["driver"])
    assert "fits" not in args(view({"stack": {"provider": "apt", "driver": "570.172.08"}}), "apply")


def test_nothing_is_known_to_fit_a_card_that_no_table_has() -> None:
    assert args(view(host=with_cards("0xffff", **{"smi.out": ""})), "apply")["fits"] == {"driver": [], "cudnn": []}


# ------------------------------------------------------------------------------------ chosen on the host

OFFER = offer(
    *driver_packages("550.163.01"), *driver_packages("570.124.06"), *driver_packages("570.172.08"),
    *driver_packages("580.95.05", flavour="-server"), package("libcudnn9-cuda-12", "9.8.0.87-1"),
    package("libcudnn9-cuda-12", "9.10.2.21-1"), package("libcudnn9-cuda-13", "9.17.0.29-1"),
    package("libcudnn8", "8.9.7.29-1+cuda12.2"), package("libcudnn8", "8.9.7.29-1+cuda11.8"),
)  # fmt: skip


def opened(wanted: dict[str, str], ranges: list[list[str]], have: dict[str, str]) -> Any:
    return close_open({"cuda": "12.8.1", **wanted}, dict.fromkeys(("driver", "cudnn"), ranges), OFFER, have)


def test_the_newest_offered_one_in_the_ranges_is_chosen_in_the_hosts_own_shape() -> None:
    found = opened({"driver": "auto", "cudnn": "auto"}, ALL, installed("550.54.15"))
    assert found.problems == []
    assert found.chosen == {"driver": "570.172.08", "cudnn": "9.10.2.21"}
    assert found.offered == {"driver": 3, "cudnn": 3}
    assert found.wanted == {"cuda": "12.8.1", "driver": "570.172.08", "cudnn": "9.10.2.21"}
    assert opened({"driver": "auto"}, ALL, installed("550.54.15", "-server")).chosen == {"driver": "580.95.05"}
    assert opened({"driver": "auto"}, [["550", "551"]], {}).chosen == {"driver": "550.163.01"}
    assert opened({"cudnn": "auto"}, [["8.9", "9"]], {}).chosen == {"cudnn": "8.9.7.29"}


def test_what_is_named_is_left_as_it_is() -> None:
    found = opened({"driver": "570.124.06"}, [], installed("550.54.15"))
    assert found.wanted == {"cuda": "12.8.1", "driver": "570.124.06"} and not found.chosen and not found.problems


def test_no_fitting_version_is_a_problem_that_names_what_is_offered() -> None:
    (why,) = opened({"driver": "auto"}, [["600", "700"]], installed("550.54.15")).problems
    assert "no offered version is known to fit this host (offered: 550.163.01, 570.124.06, 570.172.08)" in why


def test_an_open_version_never_goes_down() -> None:
    (why,) = opened({"driver": "auto"}, [["550", "560"]], installed("570.124.06")).problems
    assert "570.124.06 is installed, the newest offered that is known to fit is 550.163.01" in why


def test_numbers_compare_as_numbers() -> None:
    assert inside("525.105.17", [["525.60.13", "526"]]) and not inside("525.60.9", [["525.60.13", "526"]])


# ------------------------------------------------------------------------- judged, shown, kept, verified


def test_the_choice_is_said_and_shown() -> None:
    chosen = report(chosen={"driver": "570.172.08"}, offered={"driver": 4})
    line = "driver auto: 570.172.08, the newest of 4 offered that is known to fit"
    assert line in judge(view(), chosen).findings
    assert line in preview(view(), chosen)
    assert preview(view(), report(chosen={"driver": "570.172.08"}, offered={"driver": 4}, as_wanted=True))[0] == line


def test_what_preflight_chose_is_what_is_installed_and_verified() -> None:
    """Kept with the accepted report: a resume asks neither the tables nor the package sources again."""
    before = view()
    assert facts.wanted(before) == {"cuda": "12.8.1"}
    transaction = {"install": {"nvidia-driver-570": "570.172.08-0ubuntu1"}, "driver": "570.172.08"}
    body = {"state": "done", "chosen": {"driver": "570.172.08", "cudnn": "9.8.0.87"}, "transaction": transaction}
    after = view(**{"preflight/apt": body})
    assert facts.wanted(after) == {"driver": "570.172.08", "cuda": "12.8.1", "cudnn": "9.8.0.87"}
    assert stack_args(after, "apply")["transaction"] == transaction
    assert wish(before).versions == {"cuda": "12.8.1"}


def test_the_preview_shows_versions_not_the_word_auto(tmp_path: Any) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "version: 1\nname: a\nreason: b\nhosts: [gpu1]\nstack: {provider: apt, driver: auto, cudnn: auto}\n"
    )
    looks = {
        "preflight/host": {"state": "done", "facts": TWO_H100},
        "preflight/apt": {"state": "done", "chosen": {"driver": "570.172.08", "cudnn": "9.8.0.87"}},
    }
    (host,) = build(plans.load(path), PHASES, {"gpu1": looks}, {}).hosts
    shown = {version.component: version.after for version in host.versions}
    assert shown == {"driver": "570.172.08", "cuda": "", "cudnn": "9.8.0.87", "container_toolkit": ""}


# ------------------------------------------------------------------------------- the tables in preflight


def said_by_host(plan: dict[str, str], host: dict[str, Any]) -> tuple[str, str]:
    seen = HostView("gpu1", {"stack": {"provider": "apt", **plan}}, HOST.params().model_dump(mode="json"))
    verdict = HOST.judge(seen, HOST.report.model_validate({"state": "done", "facts": host}))
    return verdict.outcome, "\n".join([verdict.why, *verdict.findings])


@pytest.mark.parametrize(
    ("plan", "host", "rule"),
    [
        ({"driver": "590.48.01"}, with_cards("0x1db4"), "card-dropped-by-driver"),
        ({"cuda": "13.0"}, with_cards("0x1db4"), "card-dropped-by-cuda"),
        ({"cudnn": "9.17.0"}, with_cards("0x1db4"), "cudnn-card"),
        ({"driver": "580.173.02"}, with_cards("0x2bb1"), "module-flavour"),
        ({"driver": "570.172.08", "cuda": "13.0"}, TWO_H100, "cuda-driver-floor"),
        ({"cuda": "13.0"}, TWO_H100, "cuda-driver-floor"),
    ],
)
def test_preflight_refuses_before_any_change_with_rule_and_source(
    plan: dict[str, str], host: dict[str, Any], rule: str
) -> None:
    outcome, words = said_by_host(plan, host)
    assert outcome == "reject"
    assert f"[{rule}; source: " in words and "preflight: {accept: [incompatible]}" in words


def test_what_the_plan_does_not_touch_does_not_stop_it() -> None:
    """The host is at odds with the tables as it is; a new container toolkit changes nothing about that."""
    odd = with_cards("0x2bb1")
    assert said_by_host({"container_toolkit": "1.17.8"}, odd)[0] == "accept"


def test_warnings_and_what_no_table_has_are_findings() -> None:
    outcome, words = said_by_host({"driver": "570.172.08", "cuda": "12.8.1"}, TWO_H100)
    assert outcome == "accept" and "driver branch R570 (PB) reached its end of life in 2026-02" in words
    outcome, words = said_by_host({"driver": "640.10"}, TWO_H100)
    assert outcome == "accept" and "not in the tables: driver branch R640" in words


def test_the_chosen_packages_are_held_against_the_tables_again() -> None:
    """Only the packages tell which flavour and which fabric manager come."""
    blackwell = view({"stack": {"provider": "apt", "driver": "570.172.08"}}, with_cards("0x2bb1"))
    closed = report(transaction={"install": {"nvidia-dkms-570": "570.172.08-0ubuntu1"}, "driver": "570.172.08"})
    refused = judge(blackwell, closed)
    assert refused.outcome == "reject" and "use the open flavour [module-flavour; source: " in refused.why
    open_one = report(transaction={"install": {"nvidia-dkms-570-open": "570.172.08-0ubuntu1"}})
    assert judge(blackwell, open_one).outcome == "accept"
    manager = report(transaction={"install": {"nvidia-fabricmanager-570": "570.124.06-1"}})
    assert "fabric-manager-equal" in judge(with_switch(), manager).why
    accepting = HostView("gpu1", {**OPEN, "preflight": {"accept": ["incompatible"]}}, {}, last=blackwell.last)
    assert judge(accepting, closed).outcome == "accept"


def with_switch() -> HostView:
    rows = [*TWO_H100["pci"], {"address": "0000:07:00.0", "class": "0x068000", "device": "0x22a3"}]
    return view({"stack": {"provider": "apt", "driver": "570.172.08"}}, patched({"pci": rows}))


@pytest.mark.parametrize(
    ("names", "flavour"),
    [
        (["nvidia-dkms-570", "nvidia-kernel-common-570"], "proprietary"),
        (["nvidia-dkms-570-open", "nvidia-kernel-source-570-open"], "open"),
        (["nvidia-dkms-570-server-open"], "open"),
        (["nvidia-open-kernel-dkms"], "open"),
        (["nvidia-kernel-open-dkms"], "open"),
        (["nvidia-kernel-dkms"], "proprietary"),
        (["linux-modules-nvidia-570-open-generic"], "open"),
        (["libnvidia-compute-570", "cuda-toolkit-12-8"], ""),
    ],
)
def test_the_flavour_is_told_by_the_packages_names(names: list[str], flavour: str) -> None:
    assert compatibility.flavour_of(names) == flavour


def test_facts_become_a_question() -> None:
    asked = compatibility.question(TWO_H100, snapshot.parse(TWO_H100), {"cuda": "12.8"})
    assert [card.name for card in asked.cards] == ["H100"]
    assert (asked.driver, asked.cuda, asked.module) == ("550.54.15", "12.8", "proprietary")
    assert (asked.machine, asked.kernel) == ("x86_64", "6.1.0-18-amd64")
    assert "Debian" in asked.distribution and asked.today.year == 2026
    assert fits(asked, "cudnn", "9.8.0")
    nothing = compatibility.question({}, snapshot.parse({}), {})
    assert nothing.cards == () and nothing.today == compatibility.LONG_AGO


def test_a_card_without_a_known_id_is_known_by_its_name() -> None:
    asked = compatibility.question(host := with_cards("0xffff"), snapshot.parse(host), {})
    assert [card.name for card in asked.cards] == ["H100"]


@pytest.mark.case("smi-cuda-version-is-not-the-toolkit")
def test_what_the_driver_carries_is_never_taken_for_the_toolkit() -> None:
    host = patched(
        {
            "cuda.toolkits": {"/usr/local/cuda-11.3": {"txt": "CUDA Version 11.3.1"}},
            "cuda.link": ["/usr/local/cuda", "/usr/local/cuda-11.3"],
        }
    )
    picture = snapshot.parse(host)
    assert (picture.smi.cuda, picture.cuda.active) == ("12.4", "11.3.1")
    assert snapshot.summary(picture)["cuda"] == "11.3.1"
    assert compatibility.question(host, picture, {}).cuda == "11.3.1"
    assert said_by_host({"driver": "570.172.08"}, host)[0] == "accept"
    outcome, words = said_by_host({"cuda": "13.0"}, host)
    assert outcome == "reject" and "toolkit 13.0 needs driver 580.65.06 or newer, not 550.54.15" in words


@pytest.mark.case("fabricmanager-fails-where-not-needed")
def test_a_fabric_manager_without_nvswitch_is_said_and_fails_nothing() -> None:
    host = patched({"packages.packages": {**TWO_H100["packages"]["packages"], "nvidia-fabricmanager-550": "550.1.1-1"}})
    picture = snapshot.parse(host)
    assert picture.fabric_manager == "550.1.1" and not picture.switches
    outcome, words = said_by_host({"driver": "570.172.08"}, host)
    assert outcome == "accept" and "no NVSwitch on this host: fabric manager not required" in words
    assert [found.says for found in wanted.compare({}, picture, picture) if not found.ok] == []
