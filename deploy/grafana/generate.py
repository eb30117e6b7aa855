"""Write the dashboards that Grafana reads from their descriptions: ``python deploy/grafana/generate.py [FOLDER]``.

Needs grafana-foundation-sdk, of which the version after the ``!`` is that of Grafana.
"""

import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

from communication import COMMUNICATION
from grafana_foundation_sdk.builders import common, heatmap, prometheus, table, tempo, timeseries
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import ScaleDistribution, StackingMode, VisibilityMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.tempo import SearchTableType
from hosts import MACHINES
from panels import BUCKETS, ROWS, STACK, TRACES, Dashboard, Panel
from training import TRAINING

FOLDER = Path(__file__).with_name("dashboards")
DASHBOARDS = (TRAINING, COMMUNICATION, MACHINES)
PROMETHEUS = DataSourceRef(type_val="prometheus", uid="prometheus")
TEMPO = DataSourceRef(type_val="tempo", uid="tempo")
JAEGER_URL = "http://127.0.0.1:16686"
WIDTH, HEIGHT = 12, 8
TAG = "otel_dltrace"


def text_of(description: Dashboard) -> str:
    """Return the file that Grafana reads."""
    return json.dumps(_dashboard(description).build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _dashboard(description: Dashboard) -> grafana.Dashboard:
    out = grafana.Dashboard(f"{description.title} (otel_dltrace)").uid(f"dltrace-{description.name}").readonly()
    out.tags([TAG]).time("now-30m", "now").refresh("10s").tooltip(DashboardCursorSync.CROSSHAIR)
    others = grafana.DashboardLink("Dashboards").type(DashboardLinkType.DASHBOARDS).tags([TAG]).as_dropdown(True)
    out.link(others.include_vars(True).keep_time(True))
    out.link(grafana.DashboardLink("Jaeger").type(DashboardLinkType.LINK).url("${jaeger}/search").target_blank(True))
    for name, query in description.variables.items():
        out.with_variable(_choice(name, query))
    out.with_variable(grafana.TextBoxVariable("jaeger").label("Jaeger").default_value(JAEGER_URL))
    number = count(1)
    for title, panels in description.rows.items():
        out.with_row(grafana.Row(title).id(next(number)))
        for panel in panels:
            out.with_panel(_panel(panel).id(next(number)))
    return out


def _choice(name: str, query: str) -> grafana.QueryVariable:
    choice = grafana.QueryVariable(name).query(query).datasource(PROMETHEUS).multi(True).include_all(True)
    choice.all_value(".*").sort(VariableSort.ALPHABETICAL_ASC)
    return choice.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def _panel(panel: Panel) -> Any:
    out = _shape(panel).title(panel.title).description(panel.text).span(WIDTH).height(HEIGHT)
    if panel.show == TRACES:
        return out.datasource(TEMPO).targets([_traces(query) for query in panel.queries.values()])
    for name, (legend, query) in zip("ABC", panel.queries.items(), strict=False):
        out.with_target(_query(panel, query, legend).ref_id(name))
    return out.datasource(PROMETHEUS).unit(panel.unit)


def _shape(panel: Panel) -> Any:
    if panel.show == TRACES:
        return table.Panel()
    if panel.show in (ROWS, BUCKETS):
        linear = common.ScaleDistributionConfig().type(ScaleDistribution.LINEAR)
        colours = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
        cells = heatmap.Panel().calculate(False).cell_gap(1).scale_distribution(linear).color(colours)
        if panel.show == BUCKETS:
            return cells.y_axis(heatmap.YAxisConfig().unit(panel.unit))
        return cells.cell_values(heatmap.CellValues().unit(panel.unit))
    lines = timeseries.Panel().min(0).show_points(VisibilityMode.NEVER).fill_opacity(60 if panel.show == STACK else 5)
    return lines.stacking(common.StackingConfig().mode(StackingMode.NORMAL)) if panel.show == STACK else lines


def _query(panel: Panel, query: str, legend: str) -> prometheus.Dataquery:
    out = prometheus.Dataquery().expr(query).legend_format(legend).range()
    if panel.show == BUCKETS:
        return out.format(PromQueryFormat.HEATMAP)
    return out.exemplar("_bucket" in query)


def _traces(query: str) -> tempo.TempoQuery:
    found = tempo.TempoQuery().query_type("traceql").query(query).limit(20)
    return found.table_type(SearchTableType.TRACES).ref_id("A")


def main(folder: Path = FOLDER) -> None:
    """Write all dashboards."""
    folder.mkdir(exist_ok=True)
    for description in DASHBOARDS:
        (folder / f"{description.name}.json").write_text(text_of(description), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
