"""What the documentation shows is true: its stacks are valid, its examples run, its links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support_counts import fully
from support_paths import PROJECT

from faults.machine import warm
from kvtier.config import StackOptions, build_tiers, load_stack, parse_stack
from kvtier.config.layout import read_layout
from kvtier.config.plan import plan_stack
from kvtier.tier.registry import discover

ROOT = PROJECT
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
HYBRID = "full:page=32KiB,block=16;sliding_window:page=16KiB,block=16,window=512"


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


def marked_command(name: str) -> str:
    """The fenced block that follows a marker in the README."""
    found = re.search(
        rf"^<!-- command: {name} -->\n```bash\n(.*?)\n```$", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert found, f"the README marks no command {name!r}"
    return found[1]


STACKS = [
    pytest.param(block, id=f"{document.name}-{index}")
    for document in DOCUMENTS
    for index, block in enumerate(blocks(document, "yaml"))
]


@pytest.mark.parametrize("text", STACKS)
def test_a_stack_shown_in_the_documentation_is_valid(text: str) -> None:
    config = parse_stack(text)
    assert len(build_tiers(config)) == len(config.tiers)


def test_the_readme_shows_a_stack() -> None:
    assert blocks(ROOT / "README.md", "yaml")


def test_the_examples_shown_in_the_documentation_run(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    (tmp_path / "stack.yaml").write_text(blocks(ROOT / "README.md", "yaml")[0])
    runnable = (document for document in DOCUMENTS if document.name != "recipes.md")  # test_recipes runs those
    for text in (block for document in runnable for block in blocks(document, "python")):
        script.write_text(text)
        command = [sys.executable, "-W", "error", script]
        done = warm.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, text + done.stdout + done.stderr


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_an_example_stack_is_valid_and_works_for_a_hybrid_layout(path: Path) -> None:
    config = load_stack(path)
    tiers = build_tiers(config)
    layout = read_layout(HYBRID).layout(world_size=2, factor=config.block_size_factor)
    plan, problems = plan_stack(tiers, layout)
    assert not problems
    assert plan.row_bytes % plan.alignment == 0
    assert all(tier.num_blocks for tier in plan.tiers if tier.type not in ("gpu", "valkey", "mooncake"))


def test_the_example_stacks_are_these() -> None:
    local = {"cpu-only.yaml", "gpu-cpu.yaml", "gpu-cpu-fs.yaml", "multi-root.yaml"}
    remote = {"valkey.yaml", "s3.yaml", "mooncake.yaml", "gpu-cpu-fs-valkey-s3.yaml"}
    assert {path.name for path in CONFIGS} == local | remote | {"vllm-cpu-disk.yaml", "vllm-shared-fs.yaml"}


def test_the_readme_holds_exactly_two_commands_that_install_from_a_clone() -> None:
    shown = blocks(ROOT / "README.md", "bash")
    assert [block.strip() for block in shown] == [marked_command("replay"), marked_command("tests")]
    for command in shown:
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -c constraints.txt ")
    assert re.search(r"-m pytest -n \d --dist worksteal$", marked_command("tests"))
    assert marked_command("replay").endswith("kvtier replay")


@fully
def test_the_readme_shows_two_engines_that_share(tmp_path: Path) -> None:
    """Its lines as they stand, with fewer requests and the programs of this environment."""
    (lines,) = blocks(ROOT / "README.md", "sh")
    script = lines.replace(".venv/bin/kvtier", shlex.quote(str(Path(sys.executable).with_name("kvtier"))))
    script = script.replace("replay --service", "replay --requests 40 --json found.json --service")
    assert script.count("--json") == 2
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.count("every byte right") == 2, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["blocks"]
    assert found["loaded"] == found["loaded_of_recovered"] > 100


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as they are made for its page."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_link_inside_the_repository_leads_somewhere() -> None:
    for document in DOCUMENTS:
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", document.read_text()):
            if "://" not in target:
                path = document.parent / target if target else document
                assert path.exists(), f"{document.name}: {target}"
                assert not anchor or anchor in anchors(path), f"{document.name}: {target}#{anchor}"


def test_every_dependency_has_one_line_that_says_why() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.match(r"[A-Za-z0-9_-]+", requirement)[0] for requirement in project["dependencies"]}  # type: ignore[index]
    rows = re.findall(r"^\| ([a-z0-9_-]+) \| (.+) \|$", (ROOT / "docs" / "dependencies.md").read_text(), re.MULTILINE)
    names = [name for name, _ in rows if name != "package"]
    assert sorted(names) == sorted(wanted)


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    documented = set(re.findall(r"^- `([a-z_]+)` \(", text, re.MULTILINE))
    backends = discover()
    kinds = ("gpu", "cpu", "fs", "shared_fs", "valkey", "s3", "gcs", "azure", "mooncake")
    options = {name for kind in kinds for name in backends.get(kind).Options.model_fields}
    assert options | set(StackOptions.model_fields) | {"tiers"} == documented
