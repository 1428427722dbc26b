"""report.html: an ablation on one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from .pictures import Picture
from .rows import HEADINGS, notes, rows

_STYLE = """
:root { --paper:#fff; --ink:#30363d; --soft:#66707c; --line:#d9dde2; --card:#f6f7f9;
  --waiting:#e6e8ec; --parked:#f4f5f7; --host:#a3abb6; --said:#2f6db5; --bad:#c0362c; }
@media (prefers-color-scheme: dark) { :root { --paper:#15181c; --ink:#dfe3e8; --soft:#9aa4af;
  --line:#343a42; --card:#1e2329; --waiting:#353b43; --parked:#22272d; --host:#6b747f;
  --said:#6fa8e8; --bad:#ff7b70; } }
* { box-sizing:border-box } body { margin:0 auto; max-width:1180px; padding:28px 24px 60px;
  background:var(--paper); color:var(--ink); font:15px/1.5 system-ui, sans-serif; }
h1 { font-size:23px; margin:0 0 4px } h2 { font-size:17px; margin:34px 0 6px }
p, li { color:var(--ink) } .soft, figcaption { color:var(--soft); font-size:13.5px }
.verdict { border-left:5px solid var(--said); background:var(--card); padding:12px 16px;
  font-size:16.5px; margin:16px 0 } .verdict.bad { border-color:var(--bad); color:var(--bad);
  font-weight:600 } .scroll { overflow-x:auto } table { border-collapse:collapse; font-size:13px;
  font-variant-numeric:tabular-nums } th, td { padding:5px 10px; text-align:right;
  border-bottom:1px solid var(--line); white-space:nowrap } th { color:var(--soft);
  font-weight:500; vertical-align:bottom } th:first-child, td:first-child { text-align:left;
  position:sticky; left:0; background:var(--paper); font-weight:600 } td.words { text-align:left;
  white-space:normal } figure { margin:10px 0 } figure svg { width:100%; height:auto }
svg text { font-family:system-ui, sans-serif } .void { color:var(--bad) }
"""


def page(report: Mapping[str, Any], pictures: Sequence[Picture]) -> str:
    """The whole file. No script, and nothing is loaded from anywhere."""
    request = report["request"]
    title = f"{request['workload']}: ways to serve prefill and decode"
    tone = "verdict" if report["sound"] else "verdict bad"
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="soft">{escape(_conditions(report))}</p>',
            f'<p class="{tone}">{escape(report["verdict"])}</p>',
            "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in notes(report)) + "</ul>",
            *(_figure(picture) for picture in pictures),
            "<h2>Figures</h2>",
            '<p class="soft">Medians over the runs that count; ratios are to '
            f"{escape(report['reference'] or '-')}, in brackets their 95 % interval. Gaps are the "
            "most collectives of the other path between two of this one.</p>",
            _table(HEADINGS, rows(report)),
            "<h2>Runs</h2>",
            f'<p class="soft">Load: {escape(report["load"]["how"])}. Over '
            f"{report['load']['limit']:g} a run is void.</p>",
            _runs(report),
            "<h2>Workload and machine</h2>",
            _facts(report["workload"], report["machine"]),
            "</body></html>",
            "",
        ]
    )


def _conditions(report: Mapping[str, Any]) -> str:
    request, machine = report["request"], report["machine"]
    parts = [f"scale {request['scale']}"]
    if request["model"]:
        parts.append(f"model {request['model']}")
    parts.append("environments wait" if request["sleep"] else "environments answer at once")
    parts += request["overrides"]
    digests = list(report["digests"])
    parts.append(f"digest {digests[0][:16]}" if len(digests) == 1 else f"{len(digests)} digests")
    parts.append(f"{machine['cores']} cores, {machine['cpu']}")
    return " · ".join(parts)


def _figure(picture: Picture) -> str:
    return (
        f"<h2>{escape(picture.title)}</h2><figure>{picture.svg}"
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _table(headings: Iterable[str], cells: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _runs(report: Mapping[str, Any]) -> str:
    found = []
    for name, arm in report["arms"].items():
        for run in arm["runs"]:
            void = ' class="void"' if run["void"] else ""
            cells = (
                name,
                str(run["repeat"] + 1),
                f"{run['completion_s']:.2f} s",
                f"{run['cpu_s']:.2f} s",
                f"{run['load']:.1f}",
                "void" if run["void"] else "counts",
                str(run["digest"])[:12],
            )
            body = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            found.append(f"<tr{void}>{body}</tr>")
    names = ("arm", "turn", "completion", "CPU", "load", "", "digest")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(found)}</table></div>'


def _facts(workload: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    facts = [(name, value) for part in (workload, machine) for name, value in part.items()]
    body = "".join(
        f'<tr><td>{escape(name)}</td><td class="words">{escape(_words(value))}</td></tr>'
        for name, value in facts
    )
    return f'<div class="scroll"><table>{body}</table></div>'


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
