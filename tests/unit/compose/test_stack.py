"""compose/: what `docker compose config` does not see, such as names of settings, ports and paths that must agree."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.target import LocalSettings
from services.executor.core.settings import ExecutorSettings, check_engine
from services.gateway.core.settings import GatewaySettings
from services.health_monitor.service import HealthMonitorSettings
from services.scheduler.settings import SchedulerSettings
from shared.config import CommonSettings
from shared.models_file import read_models_file
from shared.nats.permissions import USERS
from tests.unit.compose.dockerfile import Dockerfile

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "compose"
TEXT = (FOLDER / "compose.yaml").read_text()
STACK: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
SETTINGS: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "health-monitor": HealthMonitorSettings,
    "executor": ExecutorSettings,
    "cli": LocalSettings,
}
USERS_OF = {**{name: name for name in SETTINGS}, "cli": "operator"}
# Services that become one of ours, and as which.
OURS = {
    name: target
    for name, service in SERVICES.items()
    if (found := re.match(r"\$\{IMAGES\}/([a-z-]+?)(?:-gpu|-vllm)?:", service["image"]))
    and (target := found[1]) in SETTINGS
    and "entrypoint" not in service
}


def env_file() -> dict[str, str]:
    lines = (FOLDER / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def read(path: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / path).read_text())
    return document


def active(*profiles: str) -> set[str]:
    return {
        name
        for name, service in SERVICES.items()
        if not service.get("profiles") or set(profiles) & set(service["profiles"])
    }


def host_and_port(url: str) -> tuple[str, str]:
    found = re.search(r"(?:^|//)([\w-]+):(\d+)", url)
    assert found, url
    return found[1], found[2]


def test_profiles_bring_what_they_are_called() -> None:
    services = {"gateway", "scheduler", "health-monitor"}
    base = services | {"secrets"}
    assert active("cpu") == base | {"no-cluster-beside", "nats", "models", "executor"}
    assert active("gpu") == base | {"no-cluster-beside", "nats", "models-gpu", "executor-gpu"}
    assert active("vllm") == base | {"no-cluster-beside", "nats", "models-vllm", "executor-vllm"}
    assert active("engine-url") == base | {"no-cluster-beside", "nats", "models", "executor-url"}
    assert active("models") == base | {"no-cluster-beside", "nats", "apply-models", "executor-host"}
    two = {f"{name}-2" for name in (*services, "executor")}
    cluster = {"no-single-server-beside", "nats-1", "nats-2", "nats-3"}
    assert active("ha") == base | two | {"models", "executor"} | cluster
    observers = {"prometheus", "grafana", "otel-collector", "tempo"}
    assert active("observability") == base | observers
    assert env_file()["COMPOSE_PROFILES"] == "cpu,observability"


@pytest.mark.parametrize("name", OURS)
def test_every_setting_is_one(name: str) -> None:
    known = {f"RYZANSTEIN_{field.upper()}" for field in SETTINGS[OURS[name]].model_fields}
    given = {key for key in SERVICES[name]["environment"] if key.startswith("RYZANSTEIN_")}
    assert given - known == {"RYZANSTEIN_SECRETS_DIR"}


def test_every_setting_in_an_image_is_one() -> None:
    file = Dockerfile(ROOT / "Dockerfile")
    for target, settings in SETTINGS.items():
        known = {f"RYZANSTEIN_{field.upper()}" for field in settings.model_fields}
        texts = [one.text for stage in file.lineage(target) for one in stage.instructions if one.keyword == "ENV"]
        assert set(re.findall(r"(RYZANSTEIN_\w+)=", " ".join(texts))) <= known, target


@pytest.mark.parametrize("name", ["executor-vllm", "executor-url"])
def test_an_engine_has_no_setting_of_a_ring(name: str) -> None:
    texts = {key: re.sub(r"\$\{\w+(?::?-([^}]*))?\}", r"\1", str(value)) for key, value in engine_variables(name)}
    given = {key: text for key, text in texts.items() if text}
    check_engine(ExecutorSettings(**given | ({"engine_url": "http://x"} if name == "executor-url" else {})))


def engine_variables(name: str) -> list[tuple[str, object]]:
    fields = {f"RYZANSTEIN_{field.upper()}": field for field in ExecutorSettings.model_fields}
    return [(fields[key], value) for key, value in SERVICES[name]["environment"].items() if key in fields]


def own_secrets(name: str) -> list[str]:
    return [volume for volume in SERVICES[name].get("volumes", []) if volume.startswith("secrets-")]


@pytest.mark.parametrize("name", OURS)
def test_a_service_has_its_own_password_and_no_other(name: str) -> None:
    user = USERS_OF[OURS[name]]
    assert SERVICES[name]["environment"]["RYZANSTEIN_NATS_USER"] == user
    assert user in USERS
    assert own_secrets(name) == [f"secrets-{user}:/run/secrets:ro"]
    assert not any("password" in key.lower() for key in SERVICES[name]["environment"])


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_may_do_no_more_than_it_must(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"memory", "pids"} <= set(service.get("deploy", {}).get("resources", {}).get("limits", {})) or (
        service["restart"] == "no"
    )
    assert service["logging"]["options"]["max-size"]


def test_what_serves_comes_back_by_itself() -> None:
    once = {name for name, service in SERVICES.items() if service["restart"] != "unless-stopped"}
    guards = {"no-cluster-beside", "no-single-server-beside"}
    assert once == {"secrets", "models", "models-gpu", "models-vllm", "apply-models", "cli"} | guards


def test_nothing_starts_before_what_it_needs_is_healthy() -> None:
    for name in set(OURS) - {"cli"}:
        needed = SERVICES[name]["depends_on"]
        for nats in ("nats", "nats-1", "nats-2", "nats-3"):
            assert needed[nats] == {"condition": "service_healthy", "required": False}, name
    assert SERVICES["executor"]["depends_on"]["models"] == {"condition": "service_completed_successfully"}
    assert SERVICES["executor-gpu"]["depends_on"]["models-gpu"]["condition"] == "service_completed_successfully"


@pytest.mark.parametrize("profile", ["cpu", "gpu", "vllm", "engine-url", "ha", "models"])
def test_what_is_needed_is_there(profile: str) -> None:
    there = active(profile, "observability")
    for name in there:
        for other, how in SERVICES[name].get("depends_on", {}).items():
            assert other in there or how.get("required") is False, f"{name} needs {other}"


def test_the_models_file_is_one_and_the_executors_may_fetch_what_it_names() -> None:
    (spec,), _ = read_models_file((FOLDER / "models.yaml").read_text())
    assert (spec.name, spec.least) == ("SmolLM2-135M-Instruct", 1)
    host = SERVICES["executor-host"]
    assert ExecutorSettings(model="", takes_models=True).is_host
    assert "${MODELS:-models}:/models" in host["volumes"]
    assert "edge" in host["networks"]


def test_services_and_their_broker_share_a_network() -> None:
    urls = SERVICES["gateway"]["environment"]["RYZANSTEIN_NATS_URL"].split(",")
    names = {host_and_port(url)[0] for url in urls}
    assert names | {"single-nats"} == set(SERVICES["nats"]["networks"]["bus"]["aliases"])
    assert all("nats" in SERVICES[name]["networks"]["bus"]["aliases"] for name in names)
    assert all("bus" in SERVICES[name]["networks"] for name in OURS)
    assert {name for name, service in SERVICES.items() if "routes" in service.get("networks", [])} == names


def test_servers_of_the_cluster_know_each_other() -> None:
    for name in ("nats-1", "nats-2", "nats-3"):
        options = dict(option.removeprefix("--").split("=", 1) for option in SERVICES[name]["command"])
        own = f"{name}-routes"
        assert SERVICES[name]["networks"]["routes"]["aliases"] == [own]
        assert options["cluster"] == f"nats://{own}:6222"
        assert options["client_advertise"] == f"{name}:4222"
        assert options["server_name"] == name
        routes = {host_and_port(url) for url in options["routes"].split(",")}
        assert routes == {(f"nats-{number}-routes", "6222") for number in (1, 2, 3)}


def test_only_what_people_use_is_published_and_only_here() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == {"gateway", "gateway-2", "prometheus", "grafana"}
    assert all(port.startswith("${BIND:-127.0.0.1}:") for ports in published.values() for port in ports)
    assert env_file()["BIND"] == "127.0.0.1"


def test_variables_without_a_default_have_one_in_the_env_file() -> None:
    named = dict(re.findall(r"\$\{(\w+)(:?-[^}]*)?\}", TEXT))
    given = env_file()
    assert {name for name, default in named.items() if not default} <= set(given)
    assert set(given) - set(named) == {"COMPOSE_PROFILES"}


def test_images_have_exact_tags() -> None:
    given = env_file()
    assert given["VERSION"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name in (
        "BASE_IMAGE",
        "NATS_IMAGE",
        "VLLM_IMAGE",
        "PROMETHEUS_IMAGE",
        "GRAFANA_IMAGE",
        "OTEL_COLLECTOR_IMAGE",
        "TEMPO_IMAGE",
    ):
        assert re.search(r":v?\d+\.\d+\.\d+", given[name]), name
    defaults = Dockerfile(ROOT / "Dockerfile").arguments
    assert defaults == {name: given[name] for name in defaults}


# --- secrets -------------------------------------------------------------------------------------------------


def set_up(folder: Path) -> dict[str, str]:
    """Runs `setup` for that folder; its files and their texts."""
    environment = {"SECRETS": str(folder), "PATH": "/usr/bin:/bin"}
    subprocess.run([FOLDER / "setup"], env=environment, check=True, capture_output=True)
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_setup_makes_every_secret_once(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    made = set_up(folder)
    assert set(made) == {"nats-passwords", "grafana-admin-password"} | {f"nats-password-{u}" for u in USERS}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o444 for file in folder.iterdir())
    single = [text for name, text in made.items() if name != "nats-passwords"]
    assert len(set(single)) == len(single)
    assert all(re.fullmatch(r"s[0-9a-f]{48}", text) for text in single)
    assert set_up(folder) == made


def test_a_deleted_secret_is_made_anew_and_told_to_the_server(tmp_path: Path) -> None:
    old = set_up(tmp_path)
    (tmp_path / "nats-password-gateway").unlink()
    new = set_up(tmp_path)
    assert new["nats-password-gateway"] != old["nats-password-gateway"]
    assert new["nats-password-gateway"] in new["nats-passwords"]
    assert new["nats-password-executor"] == old["nats-password-executor"]


def test_secrets_are_not_committed() -> None:
    assert "/compose/secrets/*" in (ROOT / ".gitignore").read_text().splitlines()


def fill_volumes(folder: Path, given: Path) -> dict[str, str]:
    """Runs `setup` as the stack's service `secrets` does; the volumes' files and their texts."""
    mounted = dict(volume.split(":")[:2] for volume in SERVICES["secrets"]["volumes"])
    for volume, place in mounted.items():
        if volume.startswith("secrets-"):
            (folder / Path(place).name).mkdir(exist_ok=True, parents=True)
    [shell, script, option, _] = SERVICES["secrets"]["entrypoint"]
    assert mounted["./setup"] == script
    command = [shell, str(FOLDER / "setup"), option, str(folder)]
    subprocess.run(command, env={"SECRETS": str(given), "PATH": "/usr/bin:/bin"}, check=True)
    return {str(file.relative_to(folder)): file.read_text() for file in folder.glob("*/*")}


def test_the_stack_makes_its_secrets_where_none_are_given(tmp_path: Path) -> None:
    made = fill_volumes(tmp_path / "volumes", tmp_path / "nothing")
    services = {f"{user}/ryzanstein_nats_password" for user in USERS if user != "batch"}
    assert set(made) == services | {"nats/batch", "nats/nats-passwords", "grafana/grafana-admin-password"}
    for user in set(USERS) - {"batch"}:
        assert f'= "{made[f"{user}/ryzanstein_nats_password"]}"' in made["nats/nats-passwords"]
        assert (tmp_path / "volumes" / user / "ryzanstein_nats_password").stat().st_mode & 0o777 == 0o444
        assert (tmp_path / "volumes" / user).stat().st_mode & 0o777 == 0o755
    assert made["nats/nats-passwords"].count(" = ") == len(USERS)
    assert fill_volumes(tmp_path / "volumes", tmp_path / "nothing") == made, "they stay"


def test_secrets_that_are_given_are_the_stacks(tmp_path: Path) -> None:
    made = fill_volumes(tmp_path / "volumes", tmp_path / "nothing")
    given = set_up(tmp_path / "given")
    copied = fill_volumes(tmp_path / "volumes", tmp_path / "given")
    assert copied["gateway/ryzanstein_nats_password"] == given["nats-password-gateway"]
    assert copied["grafana/grafana-admin-password"] == given["grafana-admin-password"]
    assert copied["nats/nats-passwords"] == given["nats-passwords"] != made["nats/nats-passwords"]


def test_one_command_works_from_the_root_as_well() -> None:
    root = read("compose.yaml")
    assert root["name"] == STACK["name"]
    [part] = root["include"]
    assert part == {"path": "compose/compose.yaml", "project_directory": "compose", "env_file": "compose/.env"}
    profiles = [line for line in (ROOT / ".env").read_text().splitlines() if not line.startswith("#")]
    assert profiles == [f"COMPOSE_PROFILES={env_file()['COMPOSE_PROFILES']}"]


def test_our_images_are_never_fetched_from_a_name_that_anybody_may_own() -> None:
    ours = {name for name, service in SERVICES.items() if service["image"].startswith("${IMAGES}/")}
    assert set(OURS) < ours
    for name in ours:
        assert SERVICES[name]["pull_policy"] == "${PULL_POLICY:-never}", name


@pytest.mark.parametrize("profile", ["cpu", "gpu", "vllm", "engine-url", "ha", "models"])
def test_every_image_of_ours_is_built_and_the_large_ones_once(profile: str) -> None:
    there = active(profile)
    images = {SERVICES[name]["image"] for name in there if SERVICES[name]["image"].startswith("${IMAGES}/")}
    builders = [SERVICES[name]["image"] for name in sorted(there) if "build" in SERVICES[name]]
    assert set(builders) == images
    for image in images:
        if "executor" in image or "/nats" in image or "/cli" in image:
            assert builders.count(image) == 1, image


@pytest.mark.parametrize(("profile", "alias"), [("cpu", "clustered-nats"), ("ha", "single-nats")])
def test_one_broker_and_three_refuse_to_run_beside_each_other(profile: str, alias: str) -> None:
    """They answer to the same names."""
    others = {"cpu": ["nats-1", "nats-2", "nats-3"], "ha": ["nats"]}[profile]
    assert all(alias in SERVICES[name]["networks"]["bus"]["aliases"] for name in others)
    [guard] = [name for name in active(profile) if alias in str(SERVICES[name].get("entrypoint", ""))]
    assert SERVICES[guard]["networks"] == ["bus"]
    assert "docker compose --profile '*' down" in " ".join(SERVICES[guard]["entrypoint"]), (
        "containers that were made and never started would keep the names of networks that are gone"
    )
    brokers = [name for name in active(profile) if name.startswith("nats")]
    assert brokers
    for name in brokers:
        assert SERVICES[name]["depends_on"] == {guard: {"condition": "service_completed_successfully"}}


def test_the_command_line_finds_the_stacks_gateway_and_models() -> None:
    cli = SERVICES["cli"]
    url = cli["environment"]["RYZANSTEIN_URL"]
    assert host_and_port(url) == ("gateway", "8000")
    assert set(cli["networks"]) & set(SERVICES["gateway"]["networks"])
    assert f"{SERVICES['executor']['volumes'][0].rsplit(':', 2)[0]}:/models:ro" in cli["volumes"]
    assert cli["environment"]["RYZANSTEIN_MODEL_CACHE"] == "/models"


# --- observability -------------------------------------------------------------------------------------------


def test_prometheus_reads_every_service_where_it_answers() -> None:
    jobs = {job["job_name"]: job for job in read("monitoring/prometheus.yml")["scrape_configs"]}
    for target, port in {"gateway": 8000, "scheduler": 8081, "health-monitor": 8081, "executor": 8081}.items():
        (found,) = jobs.pop(f"ryzanstein-{target}")["dns_sd_configs"]
        assert (found["names"], found["port"]) == ([target], port)
        for name, kind in OURS.items():
            if kind == target:
                networks = SERVICES[name]["networks"]
                assert name == target or target in networks["observability"]["aliases"], name
                assert "observability" in networks
    assert set(jobs) == {"prometheus"}
    assert "edge" not in SERVICES["prometheus"]["networks"], "a gateway's name would stand for one network there"


def test_figures_come_within_five_seconds() -> None:
    """A scrape and a refresh come one after the other, with a second left for the way."""
    scrape = read("monitoring/prometheus.yml")["global"]["scrape_interval"]
    least = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_MIN_REFRESH_INTERVAL"]
    sources = read("compose/grafana/provisioning/datasources/ryzanstein.yaml")["datasources"]
    (source,) = (one for one in sources if one["uid"] == "prometheus")
    assert scrape == least == source["jsonData"]["timeInterval"] == "2s"


def test_traces_are_handed_from_service_to_collector_to_store() -> None:
    collector, tempo = read("compose/otel-collector.yaml"), read("compose/tempo.yaml")
    named = SERVICES["gateway"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert host_and_port(named.partition("-")[2]) == ("otel-collector", "4318")
    assert collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"].endswith(":4318")
    store = collector["exporters"]["otlp"]["endpoint"]
    receiver = tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert store == f"tempo:{receiver.rpartition(':')[2]}"
    used = collector["service"]["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(used[kind]) == set(collector[kind])
    kept = [tempo["storage"]["trace"][part]["path"] for part in ("wal", "local")]
    assert all(path.startswith("/var/tempo/") for path in kept)
    assert "tempo:/var/tempo" in SERVICES["tempo"]["volumes"]


def test_grafana_finds_its_sources_and_dashboards() -> None:
    provisioning = "compose/grafana/provisioning"
    sources = read(f"{provisioning}/datasources/ryzanstein.yaml")["datasources"]
    ports = {"prometheus": "9090", "tempo": str(read("compose/tempo.yaml")["server"]["http_listen_port"])}
    assert {source["uid"]: host_and_port(source["url"]) for source in sources} == {
        name: (name, port) for name, port in ports.items()
    }
    (provider,) = read(f"{provisioning}/dashboards/ryzanstein.yaml")["providers"]
    mounts = dict(mount.split(":")[:2] for mount in SERVICES["grafana"]["volumes"])
    assert mounts["../monitoring/dashboards"] == provider["options"]["path"]
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"


@pytest.mark.parametrize("name", SERVICES)
def test_mounted_files_are_there(name: str) -> None:
    for mount in SERVICES[name].get("volumes", []):
        source = mount.replace("${MODELS:-models}", "models").replace("${SECRETS:-./secrets}", "./secrets")
        source = source.replace("${MODELS_FILE:-./models.yaml}", "./models.yaml")
        source = source.split(":")[0]
        if source.startswith("."):
            assert (FOLDER / source).exists() or source == "../monitoring/dashboards", mount
        else:
            assert source in STACK["volumes"]


def test_packed_weights_outlive_a_container_whose_models_are_read_only() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for name in ("executor", "executor-2"):
        volumes = SERVICES[name]["volumes"]
        assert any(volume.endswith(":/models:ro") for volume in volumes)
        place = SERVICES[name]["environment"]["RYZANSTEIN_WEIGHT_CACHE_DIRECTORY"]
        assert f"weights:{place}" in volumes
        assert re.search(rf"install -d -o 10001 -g 10001 .*{place}\b", text), "a volume takes its owner from there"


def test_triton_may_execute_what_it_builds() -> None:
    """What Docker mounts in memory is noexec unless it is told otherwise."""
    assert SERVICES["executor-gpu"]["tmpfs"] == ["/tmp:exec"]
    kept = SERVICES["executor-gpu"]["environment"]["TRITON_CACHE_DIR"]
    assert f"kernels:{kept}" in SERVICES["executor-gpu"]["volumes"], "else every new container compiles all kernels"
    assert SERVICES["models-gpu"]["build"]["target"] == "executor-gpu"
    assert SERVICES["models-gpu"]["image"] == SERVICES["executor-gpu"]["image"]
    assert SERVICES["models"]["build"]["target"] == "executor"
