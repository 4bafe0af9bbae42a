"""The catalogue, the page made of it, and the dashboard that uses its names."""

import json
import re

import pytest
from arch.source_tree import ROOT

from srt.config import METRICS_FAMILIES
from srt.observe import catalogue
from srt.observe.catalogue import CATALOGUE


def test_the_page_is_the_catalogue_s():
    assert (ROOT / "srt/observe/METRICS.md").read_text() == catalogue.page()


@pytest.mark.parametrize("family", METRICS_FAMILIES)
def test_no_name_means_two_things(family):
    names = [name for metric in CATALOGUE for name in metric.names(family)]
    assert len(names) == len(dict.fromkeys(names)) > 15


def test_every_name_on_the_dashboard_is_in_the_catalogue():
    dashboard = json.loads((ROOT / "examples/grafana_dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for expression in expressions for name in re.findall(r"lockstep:\w+", expression)}
    known = {name for metric in CATALOGUE for name in metric.names("lockstep")}
    histograms = {name for metric in CATALOGUE if metric.kind == "histogram" for name in metric.names("lockstep")}
    known |= {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    assert len(used) > 10
    assert used - known == set()
