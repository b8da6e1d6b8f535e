"""Every resource is one that Kubernetes, or the operator it is for, takes; an unknown field is an error."""

import functools
import importlib
import json
from typing import Any

import kubernetes_validate
import pytest
from pydantic import ValidationError

from tests.unit.k8s import manifests
from tests.unit.k8s.manifests import Resource

# The oldest that the manifests are meant for (docs/kubernetes.md), and the newest known.
VERSIONS = ("1.31", "1.37")

# Modules of classes that were made from the operators' own definitions. They take seconds to import: only when a
# test needs them.
MODELS = {
    "ScaledObject": "cloudcoil.models.keda.v1alpha1",
    "ServiceMonitor": "cloudcoil.models.prometheus_operator.v1",
    "PrometheusRule": "cloudcoil.models.prometheus_operator.v1",
}

# No package brings its definition either; `test_a_ring_over_several_nodes` looks at it.
LEADER_WORKER_SET = "LeaderWorkerSet"
# Of the Gateway API, which no package brings; `test_routes` looks at them.
ROUTES = ("HTTPRoute", "GRPCRoute")


def unknown(given: Any, understood: Any, path: str = "") -> list[str]:
    """Fields that a model has passed over."""
    if isinstance(given, dict) and isinstance(understood, dict):
        return [
            found
            for key, value in given.items()
            for found in (unknown(value, understood[key], f"{path}.{key}") if key in understood else [f"{path}.{key}"])
        ]
    if isinstance(given, list) and isinstance(understood, list):
        pairs = enumerate(zip(given, understood, strict=True))
        return [found for index, (one, other) in pairs for found in unknown(one, other, f"{path}[{index}]")]
    return []


def check_model(resource: Resource) -> None:
    kind = resource["kind"]
    model = getattr(importlib.import_module(MODELS[kind]), kind).model_validate(resource)
    assert unknown(resource["spec"], model.model_dump(mode="json", by_alias=True)["spec"]) == []


@functools.cache
def check_schema(resource: str) -> None:
    """Most resources are alike in many builds, and validating is slow: the text is the key of the cache."""
    for version in VERSIONS:
        kubernetes_validate.validate(json.loads(resource), version, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", manifests.SOME)
def test_every_resource_holds_to_its_schema(name: str) -> None:
    for resource in manifests.build(name).resources:
        if resource["kind"] in MODELS:
            check_model(resource)
        elif resource["kind"] not in (*ROUTES, LEADER_WORKER_SET):
            check_schema(json.dumps(resource))


def test_a_misspelt_field_is_found() -> None:
    service = manifests.build("base").get("Service", "nats")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**service, "spec": {**service["spec"], "port": []}}, VERSIONS[0], strict=True)
    scaled = manifests.build("overlays/production").of_kind("ScaledObject")[0]
    with pytest.raises(AssertionError, match="minReplicas"):
        check_model({**scaled, "spec": {**scaled["spec"], "minReplicas": 0}})
    with pytest.raises(ValidationError):
        check_model({**scaled, "spec": {**scaled["spec"], "pollingInterval": "often"}})


def test_routes_name_a_gateway_and_a_port_of_the_service() -> None:
    build = manifests.build("overlays/cpu+gateway-api")
    ports = {port["name"]: port["port"] for port in build.get("Service", "ryzanstein-gateway")["spec"]["ports"]}
    for kind, port in zip(ROUTES, ("http", "grpc"), strict=True):
        (route,) = build.of_kind(kind)
        assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
        assert set(route["spec"]) == {"parentRefs", "hostnames", "rules"}
        (rule,) = route["spec"]["rules"]
        assert rule["backendRefs"] == [{"name": "ryzanstein-gateway", "port": ports[port]}]


def test_a_ring_over_several_nodes_is_a_set_of_leaders_and_workers() -> None:
    """Fields as in https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1; its pods as Kubernetes has them."""
    (found,) = manifests.build("overlays/multi-node").of_kind(LEADER_WORKER_SET)
    assert found["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert set(found["spec"]) == {"replicas", "rolloutStrategy", "leaderWorkerTemplate"}
    template = found["spec"]["leaderWorkerTemplate"]
    assert set(template) == {"size", "restartPolicy", "workerTemplate"}
    assert template["restartPolicy"] in ("RecreateGroupOnPodRestart", "None")
    labels = template["workerTemplate"]["metadata"]["labels"]
    spec = {"selector": {"matchLabels": labels}, "template": template["workerTemplate"]}
    check_schema(json.dumps({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": spec}))


def test_a_ring_over_several_nodes_is_told_of_its_places() -> None:
    build = manifests.build("overlays/multi-node")
    (found,) = build.of_kind(LEADER_WORKER_SET)
    pod = build.component("executor")
    variables = manifests.environment(build, pod.main)
    places = {"NNODES": "GROUP_SIZE", "NODE_RANK": "WORKER_INDEX", "MASTER_ADDR": "LEADER_ADDRESS"}
    for ours, theirs in places.items():
        assert variables[f"RYZANSTEIN_{ours}"] == f"$(LWS_{theirs})"
    gpus = pod.main["resources"]["limits"]["nvidia.com/gpu"]
    size = found["spec"]["leaderWorkerTemplate"]["size"]
    assert int(variables["RYZANSTEIN_TP"]) == size * gpus
    assert int(variables["RYZANSTEIN_MASTER_PORT"]) == pod.ports["ring"]
    policy = build.get("NetworkPolicy", "ring")["spec"]
    ring = {"leaderworkerset.sigs.k8s.io/name": found["metadata"]["name"]}
    assert policy["podSelector"]["matchLabels"] == ring
    for direction, side in (("ingress", "from"), ("egress", "to")):
        (rule,) = policy[direction]
        assert rule[side] == [{"podSelector": {"matchLabels": ring}}]
        (ports,) = rule["ports"]
        assert ports["port"] <= pod.ports["ring"] <= ports["endPort"]
