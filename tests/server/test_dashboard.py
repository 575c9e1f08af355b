"""deploy/grafana/alula.json reads what the server exports, all of it, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from alula.model.load import LoadedModel
from tests.server.promql import Read, read
from tests.server.running import build_engine, serving
from tests.server.test_cancel import BYSTANDER, post

NOT_SHOWN: set[str] = set()
"""Metrics that the dashboard may leave out."""
OF_THE_SCRAPE = {"instance", "job"}
"""Labels that Prometheus adds."""


@dataclass(frozen=True)
class Sample:
    """counts: it only ever grows, as counters and the parts of histograms do."""

    labels: set[str]
    counts: bool


Exported = dict[str, Sample]
"""By sample name."""


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    path = Path(__file__).parents[2] / "deploy" / "grafana" / "alula.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def exported(tiny: LoadedModel) -> Exported:
    """Of a server that has drafted, accepted and rejected, so that every label has been there."""
    with serving(build_engine(tiny, max_num_seqs=4)) as server:
        for body in ({"prompt": "abab abab abab abab"}, {"speculation": {"off": True}}, {"prompt": "x" * 30}):
            post(server, BYSTANDER | body, headers={"x-alula-tag": "code"}).raise_for_status()
        text = httpx.get(f"{server.url}/metrics").text
    found: Exported = {}
    for family in text_string_to_metric_families(text):
        assert family.samples, f"{family.name} was never counted"
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                known = found.setdefault(sample.name, Sample(set(), family.type in ("counter", "histogram")))
                known.labels.update(sample.labels)
    return found


def queries(dashboard: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Title of the panel, expression, legend."""
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    return [(panel["title"], each["expr"], each["legendFormat"]) for panel in panels for each in panel["targets"]]


def variables(dashboard: Mapping[str, Any]) -> list[tuple[str, set[str], str]]:
    """Metric, labels it is matched by, label whose values are asked for."""
    found = []
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert match is not None
            ((metric, labels),) = read(match[1]).selectors
            found.append((metric, labels, match[2]))
    return found


def family(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)


def problems(dashboard: Mapping[str, Any], exported: Exported) -> list[str]:
    found, shown = [], set()
    for title, expression, legend in queries(dashboard):
        parsed = read(expression)
        shown |= {family(name) for name in parsed.metrics}
        found += [f"{title}: {fault}" for fault in _faults(parsed, legend, exported)]
    for metric, labels, label in variables(dashboard):
        known = _labels(exported, metric)
        found += [f"variable: {metric} has no {name}" for name in {*labels, label} - known]
    missing = {family(name) for name in exported if name.startswith("alula:")} - shown - NOT_SHOWN
    return found + [f"{name} is not shown" for name in sorted(missing)]


def _faults(parsed: Read, legend: str, exported: Exported) -> list[str]:
    found = [f"{name} is not exported" for name in sorted(parsed.metrics - exported.keys())]
    known = {name: _labels(exported, name) for name in parsed.metrics}
    for name, labels in parsed.selectors:
        found += [f"{name} has no label {label}" for label in sorted(labels - known[name])]
    for labels, metrics in parsed.grouped:
        found += [f"{name} has no label {label}" for name in metrics for label in sorted(labels - known[name])]
    counting = {name for name, sample in exported.items() if sample.counts}
    found += [f"{name} counts up: take its rate" for name in (parsed.metrics - parsed.rated) & counting]
    found += [f"{name} is a gauge and has no rate" for name in parsed.rated & exported.keys() - counting]
    found += [f"{name} has no quantiles" for name in parsed.quantiles if not name.endswith("_bucket")]
    named = set(re.findall(r"{{(\w+)}}", legend))
    return found + [f"the legend names {label}" for label in named - (parsed.labels or set())]


def _labels(exported: Exported, name: str) -> set[str]:
    return (exported[name].labels if name in exported else set()) | OF_THE_SCRAPE


def test_it_shows_every_metric_and_no_other(dashboard: dict[str, Any], exported: Exported) -> None:
    assert len(queries(dashboard)) > 40
    assert problems(dashboard, exported) == []
    assert {family(name) for name in exported} >= NOT_SHOWN


def test_a_renamed_metric_is_noticed(dashboard: dict[str, Any], exported: Exported) -> None:
    """Both ends: panels that read what is gone, and what nobody shows."""
    for name in sorted({family(name) for name in exported if name.startswith("alula:")} - NOT_SHOWN):
        renamed = {
            re.sub(f"^{name}(?=$|_(bucket|sum|count)$)", f"{name}x", each): labels for each, labels in exported.items()
        }
        told = problems(dashboard, renamed)
        assert any(name in fault and "is not exported" in fault for fault in told), name
        assert f"{name}x is not shown" in told


def test_a_renamed_label_is_noticed(dashboard: dict[str, Any], exported: Exported) -> None:
    labels = {label for sample in exported.values() for label in sample.labels}
    assert {"stage", "position", "depth", "part", "tag", "finished_reason", "path", "status"} <= labels
    for label in labels - {"method"}:
        renamed = {
            name: Sample({f"{each}x" if each == label else each for each in sample.labels}, sample.counts)
            for name, sample in exported.items()
        }
        assert any(f"has no label {label}" in fault for fault in problems(dashboard, renamed)), label


@pytest.mark.parametrize(
    ("expression", "legend", "fault"),
    [
        ("sum(alula:steps_total)", "", "take its rate"),
        ("rate(alula:kv_pages_used[5m])", "", "is a gauge"),
        ("sum by (colour) (rate(alula:steps_total[5m]))", "", "no label colour"),
        ('rate(alula:steps_total{stage="draft"}[5m])', "", "no label stage"),
        ("histogram_quantile(0.5, sum by (le) (rate(alula:tree_nodes_bucket[5m])))", "{{le}}", "legend names le"),
        ("sum(rate(alula:tree_nodes_total[5m]))", "", "alula:tree_nodes_total is not exported"),
    ],
)
def test_a_wrong_query_is_noticed(exported: Exported, expression: str, legend: str, fault: str) -> None:
    assert any(fault in each for each in _faults(read(expression), legend, exported))


@pytest.mark.parametrize(
    "expression",
    [
        "summ(alula:steps_total)",
        "vllm:steps_total",
        "sum(alula:steps_total",
        "histogram_quantile(0.5, sum(rate(alula:tree_nodes_bucket[5m])))",
        "sum by (tag) (rate(alula:a_total[5m])) / sum(rate(alula:b_total[5m]))",
        "alula:steps_total @",
    ],
)
def test_what_is_no_query(expression: str) -> None:
    with pytest.raises(ValueError, match=r"alula|le|wanted|match|PromQL"):
        read(expression)


def test_grafana_can_place_it(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set[tuple[int, int]]()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or (panel["description"] and panel["fieldConfig"])
    sources = {target["datasource"]["uid"] for panel in panels for target in panel.get("targets", ())}
    assert sources == {"${datasource}"}, "no data source of one installation"
