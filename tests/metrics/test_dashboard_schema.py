"""The dashboard is what Grafana's own types say a dashboard is: `@grafana/schema` from npm, checked by TypeScript."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support_programs import absent, needs
from support_prometheus import MONITORING

pytestmark = pytest.mark.prometheus
GRAFANA = Path(__file__).with_name("grafana")
LITERAL = "import type {{ DashboardFile }} from './dashboard_file';\nexport const dashboard: DashboardFile = {};\n"
WRONG = {
    "lists": ('"displayMode": "list"', '"displayMode": "lists"'),
    "fillOpacities": ('"fillOpacity": 20', '"fillOpacities": 20'),
    "'9'": ('"graphTooltip": 1', '"graphTooltip": 9'),
    "timeserie": ('"type": "timeseries"', '"type": "timeserie"'),
    "refid": ('"refId"', '"refid"'),
    "units": ('"unit"', '"units"'),
}
"""What TypeScript must name, by what is right in the dashboard and what is put there once."""


@pytest.fixture(scope="module")
def objections(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str]:
    """What TypeScript says of the dashboard, "", and of each wrong one. All in one run, because starting it takes
    seconds."""
    needs(request, "prometheus", "node", "npm")
    folder = tmp_path_factory.mktemp("grafana") / "check"
    shutil.copytree(GRAFANA, folder)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if installed.returncode != 0:
        absent(request, "prometheus", f"npm cannot install @grafana/schema: {installed.stderr[-500:]}")
    right = (MONITORING / "dashboard.json").read_text()
    assert all(right.count(good) for good, _ in WRONG.values())
    dashboards = [right, *(right.replace(*change, 1) for change in WRONG.values())]
    for number, dashboard in enumerate(dashboards):
        (folder / f"dashboard{number}.ts").write_text(LITERAL.format(dashboard))
    checked = subprocess.run(["npx", "tsc"], cwd=folder, capture_output=True, text=True, check=False)
    lines = checked.stdout.splitlines()
    assert checked.returncode == 2, checked.stdout + checked.stderr
    return {
        name: "\n".join(line for line in lines if line.startswith(f"dashboard{number}.ts("))
        for number, name in enumerate(["", *WRONG])
    }


def test_the_dashboard_is_one_by_the_types_of_grafana(objections: dict[str, str]) -> None:
    assert objections[""] == ""


@pytest.mark.parametrize("named", WRONG)
def test_a_wrong_key_or_value_is_an_error(objections: dict[str, str], named: str) -> None:
    assert named in objections[named]
