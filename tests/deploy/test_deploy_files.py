"""What the files people deploy with promise: they are valid, they fit the product, and nothing runs with more than it needs."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from sidecar import __version__
from sidecar.cli.arguments import build_parser
from sidecar.service.api.app import OPEN_TO_ALL
from sidecar.service.settings import Service
from sidecar.wiring import open_store

PROJECT = Path(__file__).parents[2]
DEPLOY = PROJECT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
PORT = 8077
CLOSING = 5
"""Seconds the service takes to close its connections, after the grace."""
NEEDED = Service().grace + CLOSING
PROVIDERS = {"E2B_API_KEY", "E2B_DOMAIN", "DAYTONA_API_KEY", "DAYTONA_API_URL", "DAYTONA_TARGET"}
THEIRS = {*PROVIDERS, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"}
"""Variables of the SDKs."""


def module(name: str) -> Any:
    """A development dependency. Without it the test is skipped; where ``CI`` is set it fails."""
    try:
        return importlib.import_module(name)
    except ImportError:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{name} is not installed")


def documents(file: Path) -> list[dict[str, Any]]:
    return list(module("yaml").safe_load_all(file.read_text("utf-8")))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return documents(DEPLOY / "compose.yaml")[0]


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, continuation lines joined."""
    lines = [line for line in (PROJECT / "Dockerfile").read_text("utf-8").splitlines() if not re.match(r"\s*#", line)]
    joined = "\n".join(lines).replace("\\\n", "")
    return [(words[0], words[1]) for line in joined.splitlines() if len(words := line.split(maxsplit=1)) == 2]


@pytest.fixture(scope="module")
def final(instructions: list[tuple[str, str]]) -> dict[str, str]:
    """The last stage, by instruction."""
    last = max(number for number, (word, _) in enumerate(instructions) if word == "FROM")
    return dict(instructions[last:])


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in MANIFESTS:
        for document in documents(file):
            if document["kind"] == "Deployment":
                yield f"{file.name}/{document['metadata']['name']}", document["spec"]["template"]["spec"]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def sidecars() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for _, pod in pods():
        yield from ((pod, each) for each in containers(pod) if each["name"] == "memory-sidecar")


def port_served(words: list[str]) -> int:
    """Where a command listens. Argparse ends the test when the product would not take it."""
    args = build_parser().parse_args(words)
    assert args.command == "serve"
    return int(args.bind.rpartition(":")[2])


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def small_tmp(mount: str) -> bool:
    return mount.startswith("/tmp:") and "size=" in mount


def test_every_deployment_passes_on_what_reaches_the_providers(compose: dict[str, Any]) -> None:
    found = list(sidecars())
    assert len(found) == 2
    for _, container in found:
        passed = {row["name"]: row for row in container["env"]}
        assert passed.keys() >= PROVIDERS
        assert all(passed[name]["valueFrom"]["secretKeyRef"]["optional"] for name in PROVIDERS)
    assert compose["services"]["sidecar"]["environment"].keys() >= PROVIDERS
    for page in ("README.md", "railway/README.md"):
        assert all(f"`{name}" in (DEPLOY / page).read_text() for name in PROVIDERS)


def test_the_base_of_the_image_can_be_chosen(instructions: list[tuple[str, str]]) -> None:
    assert instructions[:2] == [("ARG", "BASE=python:3.13-slim"), ("ARG", "DIGEST=")]
    stages = [rest for word, rest in instructions if word == "FROM"]
    assert stages == ["${BASE}${DIGEST:+@}${DIGEST} AS build", "${BASE}${DIGEST:+@}${DIGEST}"]


def test_the_image_runs_as_nobody_special_and_forgets_no_volume(final: dict[str, str]) -> None:
    assert final["USER"] == "10001:10001"
    assert "VOLUME" not in final, "a nameless volume would pass for a mounted one"
    assert "MEMORY_SIDECAR_STORE=volume:/data" in final["ENV"]
    assert "PYTHONDONTWRITEBYTECODE=1" in final["ENV"]
    assert final["STOPSIGNAL"] == "SIGTERM"
    assert not re.search(r"\bpip\b|apt-get|gcc", " ".join(final.values()))


def test_the_image_serves_where_its_health_check_asks(final: dict[str, str]) -> None:
    entry, command = json.loads(final["ENTRYPOINT"]), json.loads(final["CMD"])
    assert entry == ["memory-sidecar"]
    assert port_served(command) == PORT == int(final["EXPOSE"])
    check = json.loads(final["HEALTHCHECK"].partition(" CMD ")[2])
    assert "/healthz" in OPEN_TO_ALL and "'/healthz'" in check[-1] and str(PORT) in check[-1]
    compile(check[-1], "HEALTHCHECK", "exec")


def test_what_the_image_copies_is_sent_to_the_build(instructions: list[tuple[str, str]]) -> None:
    copied = {
        name for word, rest in instructions if word == "COPY" and "--from" not in rest for name in rest.split()[:-1]
    }
    ignored = (PROJECT / ".dockerignore").read_text("utf-8").splitlines()
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    assert all((PROJECT / name).exists() for name in copied)


def test_compose_is_valid(compose: dict[str, Any]) -> None:
    module("check_jsonschema")
    schema = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    module("jsonschema").validate(compose, json.loads(schema.read_text("utf-8")))


def test_compose_gives_nobody_more_than_needed(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(small_tmp(mount) for mount in service["tmpfs"]), name
        assert "privileged" not in service and "cap_add" not in service, name
    assert compose["services"]["sidecar"]["ports"][0].startswith("127.0.0.1:")


def test_compose_waits_for_the_service_to_finish(compose: dict[str, Any]) -> None:
    assert seconds(compose["services"]["sidecar"]["stop_grace_period"]) >= NEEDED


def test_two_services_stand_on_one_bucket(compose: dict[str, Any]) -> None:
    sidecar = compose["services"]["sidecar"]
    assert sidecar["deploy"]["replicas"] == 2
    found = re.search(r":\$\{\w+:-(\d+)-(\d+)\}:8077$", sidecar["ports"][0])
    assert found is not None and int(found[2]) - int(found[1]) + 1 == 2, "each takes a port of its own"
    assert sidecar["environment"]["MEMORY_SIDECAR_STORE"].startswith("s3://")
    kinds = {one["kind"]: one for one in documents(DEPLOY / "kubernetes" / "service.yaml")}
    assert kinds["Deployment"]["spec"]["replicas"] == 2
    assert kinds["Deployment"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert not [one for one in kinds["Deployment"]["spec"]["template"]["spec"]["volumes"] if "emptyDir" not in one]
    assert kinds["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    # What an answer 202 points to is known to the one that gave it.
    assert kinds["Service"]["spec"]["sessionAffinity"] == "ClientIP"


def test_compose_has_no_secret_of_its_own(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for variable, value in service["environment"].items():
            if re.search("TOKEN|SECRET", variable):
                assert re.fullmatch(r"\$\{\w+:\?.+\}", value), f"{name}: {variable}"


def test_compose_asks_and_mounts_what_is_there(compose: dict[str, Any]) -> None:
    services = compose["services"]
    code = services["sidecar"]["healthcheck"]["test"][-1]
    assert re.findall(r'"(/\w+)"', code) == ["/readyz"] and "/readyz" in OPEN_TO_ALL
    compile(code, "healthcheck", "exec")
    compile(services["bucket"]["command"][0], "bucket", "exec")
    assert open_store(services["sidecar"]["environment"]["MEMORY_SIDECAR_STORE"]).url.startswith("s3://memories/")
    mounted = {mount.split(":")[0] for service in services.values() for mount in service.get("volumes", ())}
    assert {name for name in mounted if not name.startswith(".")} == set(compose["volumes"])
    assert all((DEPLOY / name).is_dir() for name in mounted if name.startswith("."))


@pytest.mark.parametrize("version", ["1.29", None], ids=["oldest", "newest"])
@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_kubernetes_manifests_are_valid(file: Path, version: str | None) -> None:
    validator = module("kubernetes_validate")
    for document in documents(file):
        validator.validate(document, version or validator.latest_version(), strict=True)


def test_pods_meet_the_restricted_standard() -> None:
    for name, pod in pods():
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] == 10001, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        # Else Kubernetes names variables after the Service memory-sidecar, and they would look like settings.
        assert pod["enableServiceLinks"] is False, name
        for container in containers(pod):
            allowed = container["securityContext"]
            assert allowed["readOnlyRootFilesystem"] is True and allowed["allowPrivilegeEscalation"] is False, name
            assert allowed["capabilities"] == {"drop": ["ALL"]}, name
            assert container["resources"]["requests"] and container["resources"]["limits"]["memory"], name


def test_pods_are_probed_where_they_listen() -> None:
    for _, container in sidecars():
        assert port_served(container["args"]) == PORT == container["ports"][0]["containerPort"]
        probes = {name: container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
        assert {probe["path"] for probe in probes.values()} <= OPEN_TO_ALL
        assert (probes["readinessProbe"]["path"], probes["livenessProbe"]["path"]) == ("/readyz", "/healthz")
        assert {probe["port"] for probe in probes.values()} == {container["ports"][0]["name"]}


def test_pods_have_time_to_finish() -> None:
    for pod, container in sidecars():
        before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert pod["terminationGracePeriodSeconds"] >= NEEDED + float(before[1])


def test_the_native_sidecar_starts_first_and_ends_last() -> None:
    pod = dict(pods())["native-sidecar.yaml/conductor"]
    assert pod["initContainers"][0]["restartPolicy"] == "Always"
    assert pod["initContainers"][0]["startupProbe"]["httpGet"]["path"] == "/readyz"
    shared = [{mount["name"] for mount in each["volumeMounts"]} for each in containers(pod)]
    assert "sandboxes" in shared[0] & shared[1]


def test_pods_run_this_version_and_mount_what_they_declare() -> None:
    for name, pod in pods():
        declared = {volume["name"] for volume in pod["volumes"]}
        for container in containers(pod):
            assert container["image"] == f"memory-sidecar:{__version__}", name
            assert {mount["name"] for mount in container["volumeMounts"]} <= declared, name
        assert {mount["name"] for each in containers(pod) for mount in each["volumeMounts"]} == declared, name


def test_railway_waits_checks_and_needs_its_volume() -> None:
    config = tomllib.loads((DEPLOY / "railway" / "railway.toml").read_text("utf-8"))
    deploy = config["deploy"]
    assert type(deploy["drainingSeconds"]) is int and deploy["drainingSeconds"] >= NEEDED
    assert deploy["overlapSeconds"] == 0 and deploy["requiredMountPath"] == "/data"
    assert deploy["healthcheckPath"] in OPEN_TO_ALL
    assert deploy["restartPolicyType"] in {"ON_FAILURE", "ALWAYS", "NEVER"}
    assert (PROJECT / config["build"]["dockerfilePath"]).is_file()


def test_railway_chooses_the_port() -> None:
    command = tomllib.loads((DEPLOY / "railway" / "railway.toml").read_text("utf-8"))["deploy"]["startCommand"]
    shell, option, script = shlex.split(command)
    assert (shell, option) == ("/bin/sh", "-c") and script.startswith("exec memory-sidecar ")
    printed = script.replace("exec memory-sidecar", "printf '%s\\n'")
    said = subprocess.run([shell, option, printed], env={"PORT": "4711"}, capture_output=True, text=True, check=True)
    assert port_served(said.stdout.splitlines()) == 4711


def test_every_variable_is_one_the_product_reads() -> None:
    sources = [*(PROJECT / "sidecar").rglob("*.py"), *(PROJECT / "adapters").rglob("*.py")]
    product = {name for file in sources for name in re.findall(r"\bMEMORY_SIDECAR_[A-Z_]+", file.read_text("utf-8"))}
    files = [
        PROJECT / "Dockerfile",
        *(file for file in DEPLOY.rglob("*") if file.suffix in {".yaml", ".toml", ".md", ".py"}),
    ]
    used = {name for file in files for name in re.findall(r"\bMEMORY_SIDECAR_[A-Z]+[A-Z_]*", file.read_text("utf-8"))}
    assert {"MEMORY_SIDECAR_TOKEN", "MEMORY_SIDECAR_STORE"} <= used <= product
    for _, pod in pods():
        for container in containers(pod):
            assert {entry["name"] for entry in container["env"]} <= product | THEIRS, container["name"]


def test_the_toy_conductor_remembers_through_a_real_service(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    (tmp_path / "sandboxes").mkdir()
    serve = [sys.executable, "-m", "sidecar", "serve", "--bind", address, "--store", f"file:{tmp_path}/store"]
    converse = [sys.executable, str(DEPLOY / "conductor" / "conductor.py"), "--sandboxes", str(tmp_path / "sandboxes")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEMORY_SIDECAR_")}
    environment["MEMORY_SIDECAR_URL"] = f"http://{address}"
    with subprocess.Popen(serve, cwd=PROJECT, env=environment, stderr=subprocess.DEVNULL) as service:
        try:
            words = [*converse, "--conversations", "2", "--pause", "0"]
            told = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
        finally:
            service.terminate()
            code = service.wait(40)
    assert told.returncode == 0, told.stderr
    assert "2 conversations remembered" in told.stdout.splitlines()[-1]
    assert code == 0
    assert not list((tmp_path / "sandboxes").iterdir())
