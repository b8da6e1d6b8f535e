"""Containers have no rights that they do not need: what checkov and its like look for, and is wanted here."""

import pytest

from tests.unit.k8s import manifests
from tests.unit.k8s.manifests import Pod

builds = pytest.mark.parametrize("name", manifests.BUILDS)


def pods(name: str) -> list[Pod]:
    return manifests.build(name).pods()


@builds
def test_no_pod_is_root_or_has_a_way_to_become_it(name: str) -> None:
    for pod in pods(name):
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] >= 10_000
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@builds
def test_no_pod_has_a_token_or_a_piece_of_its_node(name: str) -> None:
    build = manifests.build(name)
    for account in build.of_kind("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    for pod in build.pods():
        assert pod.spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec)
        assert not any("hostPath" in volume for volume in pod.spec.get("volumes", []))
        assert not any("hostPort" in port for one in pod.containers for port in one.get("ports", []))


@builds
def test_every_container_has_requests_and_a_memory_limit(name: str) -> None:
    """A CPU limit have only executors, which know how many threads to start: a throttled event loop is late for
    every stream."""
    for pod in pods(name):
        for container in pod.containers:
            resources = container["resources"]
            assert {"cpu", "memory", "ephemeral-storage"} <= set(resources["requests"])
            assert {"memory", "ephemeral-storage"} <= set(resources["limits"])
    for pod in pods(name):
        if pod.component == "executor":
            requests, limits = pod.main["resources"]["requests"], pod.main["resources"]["limits"]
            assert (requests["cpu"], requests["memory"]) == (limits["cpu"], limits["memory"])


@builds
def test_images_are_named_exactly(name: str) -> None:
    for pod in pods(name):
        for container in pod.containers:
            _, _, tag = container["image"].rpartition("/")[2].partition(":")
            assert tag not in ("", "latest")
            assert container["imagePullPolicy"] == "IfNotPresent"


@builds
def test_models_are_written_by_nobody_but_who_fetches_them(name: str) -> None:
    for pod in pods(name):
        for container in pod.containers:
            for mount in container.get("volumeMounts", []):
                if mount["name"] == "models":
                    assert mount.get("readOnly", False) == (container["name"] != "model")


@builds
def test_the_namespace_refuses_pods_with_more_rights(name: str) -> None:
    (namespace,) = manifests.build(name).of_kind("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@builds
def test_updates_take_nothing_away_before_its_successor_is_ready(name: str) -> None:
    for workload in manifests.build(name).of_kind("Deployment"):
        assert workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    for workload in manifests.build(name).of_kind("StatefulSet"):
        strategy = workload["spec"].get("updateStrategy", {"type": "RollingUpdate"})
        assert strategy == {"type": "RollingUpdate"}
