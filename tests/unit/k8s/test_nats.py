"""NATS takes the configurations that it is given: alone, and as one of three."""

import re
import subprocess
from pathlib import Path

import pytest
import trustme
import yaml

from k8s import passwords
from services.cli.supervision.nats_server import find_binary
from tests.unit.k8s import manifests
from tests.unit.k8s.manifests import Build, Resource


def configuration(build: Build, directory: Path) -> Path:
    """Writes NATS' files as its pod has them; the main one's path."""
    pod = build.component("nats")
    (volume,) = [one for one in pod.spec["volumes"] if one["name"] == "config"]
    for name, text in build.get("ConfigMap", volume["configMap"]["name"])["data"].items():
        (directory / name).write_text(text)
    mounted = next(mount["mountPath"] for mount in pod.main["volumeMounts"] if mount["name"] == "config")
    return directory / Path(pod.main["command"][-1]).relative_to(mounted)


def variables(container: Resource) -> dict[str, str]:
    """The container's environment as Kubernetes makes it, its Secret being `passwords`."""
    secret, found = passwords.passwords(), {"POD_NAME": "nats-0"}
    for entry in container["env"]:
        key = entry.get("valueFrom", {}).get("secretKeyRef", {}).get("key")
        if "value" in entry:
            found[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], entry["value"])
        elif key:
            found[entry["name"]] = secret[key]
    return found


@pytest.mark.parametrize("name", ["base", "overlays/ha"])
def test_nats_server_takes_its_configuration(name: str, tmp_path: Path) -> None:
    build = manifests.build(name)
    path = configuration(build, tmp_path)
    pod = build.component("nats")

    def check(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = [find_binary(), "-t", "-c", path]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    environment = variables(pod.main)
    done = check(environment)
    assert done.returncode == 0, done.stderr
    for password in [key for key in environment if "PASSWORD" in key]:
        assert check({key: value for key, value in environment.items() if key != password}).returncode != 0


@pytest.mark.parametrize("name", ["base", "overlays/ha"])
def test_ports_and_files_are_those_of_the_container(name: str, tmp_path: Path) -> None:
    build = manifests.build(name)
    pod = build.component("nats")
    configuration(build, tmp_path)
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert pod.ports == {"client": 4222, "cluster": 6222, "monitor": 8222}
    assert 'listen: "0.0.0.0:4222"' in text
    assert "http_port: 8222" in text
    assert ('listen: "0.0.0.0:6222"' in text) == (name == "overlays/ha")
    mounts = {mount["name"]: mount["mountPath"] for mount in pod.main["volumeMounts"]}
    (pid_file,) = re.findall(r'^pid_file: "(.*)"', text, re.MULTILINE)
    assert Path(pid_file).parent == Path(mounts["run"])
    (store,) = re.findall(r'store_dir: "(.*?)"', text)
    assert Path(store).is_relative_to(mounts["store"])


def test_a_server_of_three_sends_its_clients_away_and_has_the_time(tmp_path: Path) -> None:
    build = manifests.build("overlays/ha")
    configuration(build, tmp_path)
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    times = [float(value) for value in re.findall(r'^lame_duck_\w+: "(\d+)s"', text, re.MULTILINE)]
    assert len(times) == 2
    pod = build.component("nats")
    assert pod.spec["terminationGracePeriodSeconds"] >= sum(times) + 10
    (pid_file,) = re.findall(r'^pid_file: "(.*)"', text, re.MULTILINE)
    assert pod.main["lifecycle"]["preStop"]["exec"]["command"][-1] == f"ldm={pid_file}"


def test_routes_are_the_pods_of_the_stateful_set() -> None:
    build = manifests.build("overlays/ha")
    pod = build.component("nats")
    headless = pod.workload["spec"]["serviceName"]
    routes = [value for key, value in variables(pod.main).items() if key.startswith("NATS_ROUTE")]
    assert [route.partition("@")[2] for route in routes] == [
        f"{pod}-{number}.{headless}:{pod.ports['cluster']}" for number in range(pod.workload["spec"]["replicas"])
    ]


def with_tls(directory: Path) -> Build:
    """Three servers with TLS, beside a sidecar."""
    overlay = manifests.copy(directory) / "k8s/overlays/secured"
    overlay.mkdir()
    components = ["../../components/monitoring", "../../components/ha", "../../components/nats-tls"]
    content = {"resources": ["../cpu"], "components": components}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return Build("secured", tuple(yaml.load_all(manifests.kustomize(overlay), yaml.CSafeLoader)))


def test_tls_is_between_all_who_talk_to_nats(tmp_path: Path) -> None:
    build = with_tls(tmp_path / "tree")
    files = tmp_path / "files"
    files.mkdir()
    path = configuration(build, files)
    pod = build.component("nats")
    mounts = {mount["name"]: mount["mountPath"] for mount in pod.main["volumeMounts"]}
    authority = trustme.CA()
    certificate = authority.issue_cert("nats", "*.nats-headless")
    authority.cert_pem.write_to_path(files / "ca.crt")
    certificate.private_key_pem.write_to_path(files / "tls.key")
    certificate.cert_chain_pems[0].write_to_path(files / "tls.crt")
    for file in files.glob("*.conf"):
        file.write_text(file.read_text().replace(mounts["tls"], str(files)))

    def check() -> int:
        command = [find_binary(), "-t", "-c", path]
        return subprocess.run(command, env=variables(pod.main), capture_output=True, check=False).returncode

    assert check() == 0
    assert (files / "cluster.conf").read_text().count("cluster-tls.conf") == 1
    (files / "tls.crt").unlink()
    assert check() != 0
    for one in build.pods():
        if one.component != "nats":
            trusted = Path(manifests.environment(build, one.main)["RYZANSTEIN_NATS_CA"])
            (mount,) = [mount for mount in one.main["volumeMounts"] if mount["name"] == "nats-ca"]
            (volume,) = [volume for volume in one.spec["volumes"] if volume["name"] == "nats-ca"]
            assert trusted.parent == Path(mount["mountPath"])
            assert [item["path"] for item in volume["secret"]["items"]] == [trusted.name]


def test_passwords_are_new_each_time_and_begin_with_a_letter() -> None:
    first, second = passwords.passwords(), passwords.passwords()
    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())
    assert all(re.fullmatch(r"p[0-9a-f]{48}", password) for password in first.values())
