"""The Helm chart of a service on each node: what the real helm makes of it, and engines in containers of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support_counts import fully
from support_paths import PROJECT
from support_service import kill_listener, until

from kvtier.config import parse_stack
from kvtier.options import parse_size
from kvtier.service.channel import is_listening

CHART = PROJECT / "examples" / "deploy" / "chart"
HELM = Path(sys.executable).with_name("helm")
KVTIER = Path(sys.executable).with_name("kvtier")
MEMORY = "stack.tiers[0].type=cpu,stack.tiers[0].cpu_bytes_to_use=16GiB"
DISK = "stack.tiers[1].type=fs,stack.tiers[1].roots[0]=/mnt/nvme0/kvtier,stack.tiers[1].capacity=1TiB"
VALUES = {
    "as it is": (),
    "with a disk": (MEMORY, DISK, "roots[0]=/mnt/nvme0/kvtier"),
    "with a monitor": ("metrics.podMonitor=true", "priorityClassName=system-node-critical", "nodeSelector.gpu=yes"),
}
CONTAINER = ("unshare", "--mount", "--pid", "--ipc", "--fork", "--mount-proc")
pytestmark = pytest.mark.skipif(not HELM.exists(), reason="there is no helm-binary for this machine")


def rendered(*values: str) -> dict[str, Any]:
    """The objects of a release `node` by their kinds."""
    options = [word for value in values for word in ("--set", value)]
    made = subprocess.run([HELM, "template", "node", CHART, *options], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return {one["kind"]: one for one in yaml.safe_load_all(made.stdout)}


def test_helm_finds_nothing_to_say_of_it() -> None:
    said = subprocess.run([HELM, "lint", "--strict", CHART], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout
    assert "[WARNING]" not in said.stdout


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_kubernetes_knows_every_key_of_what_it_makes(values: tuple[str, ...]) -> None:
    import kubernetes_validate  # here, because every worker would load what one test reads

    objects = rendered(*values)
    for kind, one in objects.items():
        if kind != "PodMonitor":  # of the operator of Prometheus
            for version in ("1.30", "1.37"):
                kubernetes_validate.validate(one, version, strict=True)
    assert ("PodMonitor" in objects) == ("metrics.podMonitor=true" in values)
    objects["DaemonSet"]["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(objects["DaemonSet"], "1.30", strict=True)


@pytest.mark.parametrize(
    "value", ["user=0", "socketFolder=run", "image.tags=1", "stack.tiers=", "replicas=3", "roots[0]=disk"]
)
def test_a_wrong_value_is_refused(value: str) -> None:
    made = subprocess.run([HELM, "template", CHART, "--set", value], capture_output=True, text=True, check=False)
    assert made.returncode != 0
    assert "schema" in made.stderr


def test_the_pod_has_what_its_stack_needs_and_nothing_of_the_node() -> None:
    objects = rendered(*VALUES["with a disk"])
    stack = parse_stack(objects["ConfigMap"]["data"]["stack.yaml"])
    pod = objects["DaemonSet"]["spec"]["template"]["spec"]
    (container,), (folder,) = pod["containers"], pod["initContainers"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
    memory = parse_size(container["resources"]["limits"]["memory"].replace("Gi", "GiB"))
    assert stack.tiers[0].cpu_bytes_to_use + (2 << 30) <= memory
    assert all("hostPath" in mounts[root] for root in stack.tiers[1].roots)
    socket = Path(container["args"][container["args"].index("--socket") + 1])
    assert folder["args"] == [str(socket.parent)]
    assert str(socket.parent.parent) in mounts
    assert container["livenessProbe"]["exec"]["command"][2] == str(socket)
    assert pod["terminationGracePeriodSeconds"] > stack.close_timeout_seconds + 30
    assert not {"hostPID", "hostIPC", "hostNetwork"} & set(pod)
    assert "nvidia" not in json.dumps(objects)
    shared = rendered("stack.group=4321", "stack.allow={5000,6000}")["DaemonSet"]["spec"]["template"]["spec"]
    made = shared["initContainers"][0]["command"]
    assert made[made.index("-m") + 1] == "0750"
    assert made[made.index("-g") + 1] == "4321"
    assert shared["securityContext"]["supplementalGroups"] == [4321]
    monitored = rendered(*VALUES["with a monitor"])
    assert monitored["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["port"] == container["ports"][0]["name"]
    labels = monitored["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert monitored["PodMonitor"]["spec"]["selector"]["matchLabels"].items() <= labels.items()


@fully
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="makes namespaces, as root")
def test_engines_in_containers_of_their_own_share_by_the_folder_alone(tmp_path: Path) -> None:
    """Mounts, processes and IPC of each are its own; an engine has the folder of the socket read-only."""
    objects = rendered(f"socketFolder={tmp_path}" if len(str(tmp_path)) <= 40 else "socketFolder=/tmp/kvtier-chart")
    pod = objects["DaemonSet"]["spec"]["template"]["spec"]
    make, serve = pod["initContainers"][0], pod["containers"][0]
    stack, found = tmp_path / "stack.yaml", tmp_path / "found.json"
    stack.write_text(objects["ConfigMap"]["data"]["stack.yaml"].replace("16GiB", "256MiB"))
    words = [str(stack) if word == "/etc/kvtier/stack.yaml" else word for word in serve["command"] + serve["args"]]
    words = [str(KVTIER), *words[1 : words.index("--metrics")]]
    path = words[-1]
    folder = Path(path).parent
    owner = ["-m", "0750", str(folder)]
    assert make["command"][:2] == ["install", "-d"]
    subprocess.run([*make["command"][:2], *owner], check=True)
    sees_nothing_else = f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}; ! touch {folder}/x &&"
    with subprocess.Popen([*CONTAINER, *words], stderr=subprocess.DEVNULL) as service:
        try:
            until(lambda: is_listening(path), "the service listens")
            for turn in range(2):
                if turn:
                    kill_listener(path)
                    until(lambda: is_listening(path), "its rows are served again")
                replay = f"{KVTIER} replay --service {path} --requests 40 --json {found}"
                command = [*CONTAINER, "sh", "-c", f"{sees_nothing_else} exec {replay}"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
                assert done.returncode == 0, done.stdout + done.stderr
        finally:
            subprocess.run(["pkill", "-KILL", "-P", str(service.pid)], check=False)
    shutil.rmtree(folder)
    blocks = json.loads(found.read_text())["blocks"]
    assert blocks["mismatched"] == 0
    assert blocks["loaded_of_recovered"] > max(100, blocks["loaded"] // 2)  # what is verified late is computed again
