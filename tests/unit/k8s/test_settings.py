"""What containers are told: names that their services know, times that fit each other, paths that are served."""

import pytest

from services.cli.target import LocalSettings
from services.executor.core.settings import ExecutorSettings, check_engine
from services.gateway.core.settings import GatewaySettings
from services.health_monitor.service import HealthMonitorSettings
from services.scheduler.settings import SchedulerSettings
from shared.config import ENV_PREFIX, CommonSettings
from shared.models_file import read_models_file
from shared.nats.permissions import USERS
from shared.service.endpoints import OpsApp
from tests.unit.k8s import manifests
from tests.unit.k8s.manifests import Pod, Resource, environment

SETTINGS: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "health-monitor": HealthMonitorSettings,
    "executor": ExecutorSettings,
}
# Of OpenTelemetry's specification, what is of use here.
OPEN_TELEMETRY = {
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_SERVICE_NAME",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
}
OTHERS = {"HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN", "HOME", "NCCL_DEBUG"}

# Seconds that each takes at most beside what is set (docs/operations.md, SIGTERM).
SHUTDOWN = {"gateway": 7.0, "scheduler": 10.0, "health-monitor": 2.0, "executor": 10.0}

builds = pytest.mark.parametrize("name", manifests.BUILDS)


def services(name: str) -> list[Pod]:
    return [pod for pod in manifests.build(name).pods() if pod.component in SETTINGS]


def settings_of(name: str, pod: Pod) -> CommonSettings:
    """As the service would read them; values that come with the pod are left out. Raises where one is wrong."""
    variables = environment(manifests.build(name), pod.main)
    given = {
        key.removeprefix(ENV_PREFIX).lower(): value
        for key, value in variables.items()
        if key.startswith(ENV_PREFIX) and value
    }
    if pod.workload["kind"] == "LeaderWorkerSet":  # what its controller, and a Secret, put there
        given |= {"nnodes": "2", "node_rank": "0", "master_addr": "leader", "ring_secret": "x"}
    return SETTINGS[pod.component](**given)  # type: ignore[arg-type]


@builds
def test_every_variable_is_a_setting_of_its_service(name: str) -> None:
    for pod in services(name):
        fields = {f"{ENV_PREFIX}{field.upper()}" for field in SETTINGS[pod.component].model_fields}
        names = set(environment(manifests.build(name), pod.main))
        assert names - fields - OPEN_TELEMETRY - OTHERS == set(), str(pod)


@builds
def test_what_fetches_models_is_told_where_in_a_variable_of_the_command_line(name: str) -> None:
    found = 0
    for pod in manifests.build(name).pods():
        for container in pod.containers:
            if container["name"] == "model":
                found += 1
                own = {entry["name"] for entry in container["env"]}
                fields = {f"{ENV_PREFIX}{field.upper()}" for field in LocalSettings.model_fields}
                assert own - fields - OTHERS == set()
                reader = environment(manifests.build(name), manifests.build(name).component("executor").main)
                assert (
                    environment(manifests.build(name), container)["RYZANSTEIN_MODEL_CACHE"]
                    == (reader["RYZANSTEIN_MODEL_CACHE"])
                )
    takes = environment(manifests.build(name), manifests.build(name).component("executor").main)
    assert found or takes["RYZANSTEIN_TAKES_MODELS"] == "true", "what takes models fetches them itself"


def test_the_models_file_is_applied_as_it_was_given() -> None:
    build = manifests.build("overlays/cpu+models")
    (file,) = [
        one["data"]["models.yaml"]
        for one in build.of_kind("ConfigMap")
        if one["metadata"]["name"].startswith("models-")
    ]
    assert [spec.name for spec in read_models_file(file).models] == ["smollm2"]
    (job,) = build.of_kind("Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"] == ["ryzanstein", "models", "apply", "--file", "/registry/models.yaml"]
    assert pod["volumes"][0]["configMap"]["name"].startswith("models-")
    taking = environment(build, build.component("executor").main)
    assert (taking["RYZANSTEIN_MODEL"], taking["HF_HUB_OFFLINE"]) == ("", "0")


@builds
def test_every_value_is_one_that_the_service_takes(name: str) -> None:
    for pod in services(name):
        settings = settings_of(name, pod)
        assert settings.host == "0.0.0.0"
        assert settings.nats_user == pod.component


@builds
def test_ports_are_those_that_services_listen_on(name: str) -> None:
    for pod in services(name):
        settings = settings_of(name, pod)
        if isinstance(settings, GatewaySettings):
            assert pod.ports == {"http": settings.port, "grpc": settings.grpc_port} == {"http": 8000, "grpc": 8001}
        elif isinstance(settings, ExecutorSettings) and settings.nnodes > 1:
            assert pod.ports == {"ops": settings.ops_port, "ring": settings.master_port}
        elif isinstance(settings, ExecutorSettings):
            assert pod.ports == {"ops": settings.ops_port, "handover": settings.handover_port}
            assert pod.ports == {"ops": 8081, "handover": 8100}
        else:
            assert pod.ports == {"ops": settings.ops_port} == {"ops": 8081}


@builds
def test_pods_are_killed_only_after_the_longest_drain(name: str) -> None:
    for pod in services(name):
        settings = settings_of(name, pod)
        drain = SHUTDOWN[pod.component]
        if isinstance(settings, GatewaySettings):
            assert settings.drain_delay >= 5, "load balancers take some seconds to notice"
            drain += settings.drain_delay + settings.drain_timeout
        if isinstance(settings, ExecutorSettings):
            drain += settings.drain_grace + settings.handover_timeout
        assert pod.spec["terminationGracePeriodSeconds"] >= drain + 5, str(pod)


@builds
def test_groups_and_instances_have_the_names_of_their_pods(name: str) -> None:
    for pod in services(name):
        if pod.component == "executor":
            host = next(entry for entry in pod.main["env"] if entry["name"] == "RYZANSTEIN_RING_HOST")
            assert host["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        wanted = ["RYZANSTEIN_INSTANCE", *(["RYZANSTEIN_GROUP"] if pod.component == "executor" else [])]
        entries = {entry["name"]: entry for entry in pod.main["env"]}
        for variable in wanted:
            assert entries[variable]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


@builds
def test_each_service_logs_in_with_its_own_password(name: str) -> None:
    for pod in services(name):
        (entry,) = [one for one in pod.main["env"] if one["name"] == "RYZANSTEIN_NATS_PASSWORD"]
        assert entry["valueFrom"]["secretKeyRef"]["key"] == pod.component


@builds
def test_nats_is_given_the_password_of_each_user(name: str) -> None:
    pod = manifests.build(name).component("nats")
    keys = {
        entry["name"]: entry["valueFrom"]["secretKeyRef"]["key"]
        for entry in pod.main["env"]
        if "secretKeyRef" in entry.get("valueFrom", {})
    }
    users = {f"RYZANSTEIN_NATS_PASSWORD_{user.upper().replace('-', '_')}": user for user in USERS}
    assert keys.items() >= users.items()


@builds
def test_kubernetes_sets_no_variables_that_look_like_settings(name: str) -> None:
    """A Service `ryzanstein-gateway` would bring RYZANSTEIN_GATEWAY_PORT and others."""
    assert all(pod.spec["enableServiceLinks"] is False for pod in manifests.build(name).pods())


@builds
def test_probes_ask_what_is_served_and_only_readiness_asks_whether_it_works(name: str) -> None:
    for pod in services(name):
        paths = {kind: _probed(pod, pod.main[f"{kind}Probe"]) for kind in ("startup", "liveness", "readiness")}
        # A ring that loads or is busy, or NATS that is away, must not get anybody killed.
        assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
        assert set(paths.values()) <= set(OpsApp.paths)
        liveness = pod.main["livenessProbe"]
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 30


def _probed(pod: Pod, probe: Resource) -> str:
    request = probe["httpGet"]
    assert request["port"] in pod.ports
    return str(request["path"])


@builds
def test_a_rings_threads_fit_the_cores_that_it_has(name: str) -> None:
    for pod in services(name):
        settings = settings_of(name, pod)
        if isinstance(settings, ExecutorSettings) and settings.serving_engine:
            check_engine(settings)
            assert "RYZANSTEIN_THREADS" not in environment(manifests.build(name), pod.main), "it is of rings alone"
        elif isinstance(settings, ExecutorSettings):
            limits = pod.main["resources"]["limits"]
            if settings.threads:
                assert settings.threads * settings.ranks_here == int(limits["cpu"])
            else:
                (entry,) = [one for one in pod.main["env"] if one["name"] == "RYZANSTEIN_THREADS"]
                assert entry["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"
                assert settings.tp == 1


@builds
def test_packed_weights_are_kept_where_a_ring_may_write(name: str) -> None:
    for pod in services(name):
        settings = settings_of(name, pod)
        if not isinstance(settings, ExecutorSettings) or pod.workload["kind"] == "LeaderWorkerSet":
            continue  # ... whose ranks compute on GPUs
        place = str(settings.weight_cache_directory)
        (mount,) = [one for one in pod.main["volumeMounts"] if one["mountPath"] == place]
        assert not mount.get("readOnly")
        (volume,) = [one for one in pod.spec["volumes"] if one["name"] == mount["name"]]
        (tmp,) = [one for one in pod.spec["volumes"] if one["name"] == "tmp"]
        assert bytes_of(volume["emptyDir"]["sizeLimit"]) >= settings.weight_cache_bytes
        held = [bytes_of(one["emptyDir"]["sizeLimit"]) for one in (volume, tmp)]
        assert bytes_of(pod.main["resources"]["limits"]["ephemeral-storage"]) > sum(held), "the log has the rest"


def bytes_of(quantity: str) -> int:
    """Of a Kubernetes quantity in Mi or Gi."""
    return int(quantity[:-2]) << {"Mi": 20, "Gi": 30}[quantity[-2:]]


@builds
def test_a_ring_on_gpus_has_one_for_each_rank(name: str) -> None:
    for pod in services(name):
        settings = settings_of(name, pod)
        gpus = pod.main["resources"]["limits"].get("nvidia.com/gpu")
        engine = isinstance(settings, ExecutorSettings) and settings.engine == "vllm"
        if isinstance(settings, ExecutorSettings) and (settings.device == "cuda" or engine):
            ranks = int(settings.engine_args.rpartition(" ")[2]) if engine else settings.ranks_here
            assert gpus == ranks == pod.main["resources"]["requests"]["nvidia.com/gpu"]
            (volume,) = [one for one in pod.spec["volumes"] if one["name"] == "shm"]
            assert volume["emptyDir"]["medium"] == "Memory"
        else:
            assert gpus is None


def test_traces_are_told_to_every_service() -> None:
    name = "overlays/cpu+tracing"
    for pod in services(name):
        variables = environment(manifests.build(name), pod.main)
        assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"].endswith(":4318")
        assert variables["OTEL_EXPORTER_OTLP_PROTOCOL"] == "http/protobuf"
        assert variables["OTEL_TRACES_SAMPLER"] == "parentbased_traceidratio"
        assert 0 < float(variables["OTEL_TRACES_SAMPLER_ARG"]) <= 1


def test_high_availability_is_three_brokers_and_two_of_everything_else() -> None:
    build = manifests.build("overlays/ha")
    replicas = {pod.component: pod.workload["spec"]["replicas"] for pod in build.pods()}
    assert replicas == {"nats": 3, "gateway": 2, "scheduler": 2, "health-monitor": 2, "executor": 2}
    for pod in services("overlays/ha"):
        assert settings_of("overlays/ha", pod).nats_url.count(",") == 2
