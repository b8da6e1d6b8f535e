"""Who may talk to whom, worked out of the NetworkPolicies as Kubernetes does, against docs/architecture.md."""

import itertools

import pytest

from tests.unit.k8s import manifests
from tests.unit.k8s.manifests import Build, Resource, selects

Edge = tuple[str, str, int]  # from a component, or a namespace in brackets, to another's port

SERVICES = ("gateway", "scheduler", "health-monitor", "executor")
BASE: set[Edge] = {
    ("(clients)", "gateway", 8000),
    ("(clients)", "gateway", 8001),
    *((service, "nats", 4222) for service in SERVICES),
    ("nats", "nats", 6222),
    *(("executor", "executor", port) for port in (8100, 8115)),
    ("executor", "(internet)", 443),
}
MORE: dict[str, set[Edge]] = {
    "monitoring": {
        *(("(monitoring)", service, 8081) for service in SERVICES if service != "gateway"),
        ("(monitoring)", "nats", 7777),
    },
    "autoscaling": {("(keda)", "nats", 8222)},
    "tracing": {(service, "(observability)", 4318) for service in SERVICES},
    "shared-models": {("model-fetch", "(internet)", 443)},
    "models": {("models", "nats", 4222)},
}
LESS: dict[str, set[Edge]] = {"shared-models": {("executor", "(internet)", 443)}}
PORTS = (443, 4222, 4318, 6222, 7777, 8000, 8001, 8081, 8100, 8115, 8116, 8222)

CLIENTS, INTERNET = "(clients)", "(internet)"
OUTSIDE = (CLIENTS, INTERNET, "(monitoring)", "(keda)", "(observability)", "(inference)", "(other)")


def edges(build: Build) -> set[Edge]:
    """Every pair of ends and port between which a connection may be opened."""
    ends = [*sorted({pod.component for pod in build.pods()}), *OUTSIDE]
    return {
        (source, target, port)
        for source, target, port in itertools.product(ends, ends, PORTS)
        if not {source, target} <= set(OUTSIDE)
        and _may(build, "Egress", source, target, port)
        and _may(build, "Ingress", target, source, port)
    }


def _may(build: Build, direction: str, end: str, other: str, port: int) -> bool:
    """Whether the policies of `end` let it talk to, or hear from, `other` on `port`. Outside there are none."""
    if end.startswith("("):
        return True
    labels = _labels(build, end)
    policies = [
        policy["spec"]
        for policy in build.of_kind("NetworkPolicy")
        if direction in policy["spec"]["policyTypes"] and selects(policy["spec"]["podSelector"], labels)
    ]
    assert policies, f"{end} is under no policy"
    side = "to" if direction == "Egress" else "from"
    return any(
        _covers(rule, side, build, other, port) for policy in policies for rule in policy.get(direction.lower(), [])
    )


def _covers(rule: Resource, side: str, build: Build, other: str, port: int) -> bool:
    if not any(one["port"] <= port <= one.get("endPort", one["port"]) for one in rule["ports"]):
        return False
    if side not in rule:  # anybody: told of as one
        return other == CLIENTS
    return any(_is(peer, build, other) for peer in rule[side])


def _is(peer: Resource, build: Build, other: str) -> bool:
    if "ipBlock" in peer:
        return other == INTERNET and peer["ipBlock"]["cidr"] == "0.0.0.0/0"
    if "namespaceSelector" in peer:
        return other == f"({peer['namespaceSelector']['matchLabels']['kubernetes.io/metadata.name']})"
    return not other.startswith("(") and selects(peer["podSelector"], _labels(build, other))


def _labels(build: Build, component: str) -> dict[str, str]:
    return build.component(component).labels


@pytest.mark.parametrize("name", manifests.SOME)
def test_those_who_must_talk_may_and_nobody_else(name: str) -> None:
    component = name.partition("+")[2]
    wanted = (BASE | MORE.get(component, set())) - LESS.get(component, set())
    if name == "overlays/multi-node":
        wanted = (BASE | MORE["shared-models"]) - LESS["shared-models"]
    if name == "overlays/engine-url":
        wanted = BASE | {("executor", "(inference)", 8000)}
    if name == "overlays/production":
        wanted = BASE.union(MORE["monitoring"], MORE["autoscaling"], MORE["tracing"])
    assert edges(manifests.build(name)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", manifests.BUILDS)
def test_what_is_not_allowed_is_denied_for_every_pod(name: str) -> None:
    build = manifests.build(name)
    denial = build.get("NetworkPolicy", "default-deny")["spec"]
    assert denial == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    dns = build.get("NetworkPolicy", "dns")["spec"]
    assert dns["podSelector"] == {}
    assert [one["port"] for one in dns["egress"][0]["ports"]] == [53, 53]


@pytest.mark.parametrize("name", manifests.BUILDS)
def test_the_way_to_the_internet_leads_to_no_private_address(name: str) -> None:
    for policy in manifests.build(name).of_kind("NetworkPolicy"):
        for rule in policy["spec"].get("egress", []):
            for peer in rule.get("to", []):
                if peer.get("ipBlock", {}).get("cidr") == "0.0.0.0/0":
                    assert {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"} <= set(
                        peer["ipBlock"]["except"]
                    )
