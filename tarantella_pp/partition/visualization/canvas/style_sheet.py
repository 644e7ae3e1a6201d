"""The style sheets: of pictures, and of the page around them; light and dark."""

from __future__ import annotations

from tarantella_pp.partition.visualization.canvas.palette import (
    DARK,
    INK,
    KINDS,
    LIGHT,
    PARTS,
    Scheme,
)

MONO = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'
SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'


def picture_style() -> str:
    """Returns the style of pictures in both schemes."""
    shared = [
        f".picture text{{font:12px {MONO}}}",
        ".picture .strong{font-weight:700;font-size:13px}",
        ".picture .small{font-size:10.5px}",
        ".picture .middle{text-anchor:middle}",
        ".picture .right{text-anchor:end}",
        f".picture .ink{{fill:{INK};font-size:10px;text-anchor:middle}}",
        ".link,.cut{fill:none;stroke-width:1.3}",
        ".cut{stroke-width:1.8}",
        ".panel{fill-opacity:.09;stroke-opacity:.55}",
        ".box,.grid{stroke-width:1}",
        ".end{stroke-dasharray:4 3}",
        ".limit{fill:none;stroke-width:1.8;stroke-dasharray:7 4}",
        *(f".kind{kind}{{fill:{colour}}}" for kind, colour in KINDS.items()),
        *(f".part-{part}{{fill:{colour}}}" for part, colour in PARTS.items()),
        f".slice{{stroke:{INK};stroke-opacity:.35;stroke-width:1}}",
    ]
    dark = "".join(_colours(DARK))
    return "".join([*shared, *_colours(LIGHT), f"@media (prefers-color-scheme:dark){{{dark}}}"])


def _colours(scheme: Scheme) -> list[str]:
    rules = [
        f".card{{fill:{scheme.card}}}",
        f".picture text{{fill:{scheme.text}}}",
        f".picture .muted{{fill:{scheme.muted}}}",
        f".picture .over{{fill:{scheme.warning};font-weight:700}}",
        f".picture .ink{{fill:{INK}}}",
        f".grid,.link{{stroke:{scheme.line}}}",
        f".link{{stroke:{scheme.muted}}}.head{{fill:{scheme.muted}}}",
        f".box{{fill:{scheme.card};stroke:{scheme.muted};stroke-opacity:.55}}",
        f".idle{{fill:{scheme.page}}}.stripe{{stroke:{scheme.idle}}}",
        f".limit{{stroke:{scheme.warning}}}",
        f".halo{{paint-order:stroke;stroke:{scheme.card};stroke-width:3px}}",
    ]
    for i, colour in enumerate(scheme.stages):
        rules.append(f".f{i}{{fill:{colour}}}.k{i}{{stroke:{colour}}}")
        rules.append(f".s{i}{{fill:{colour};stroke:{colour}}}.pill.s{i}{{fill:{scheme.card}}}")
    return rules


def page_style() -> str:
    """Returns the style of the page, that of its pictures included."""
    dark = "".join(_page_colours(DARK))
    return "".join(
        [
            _PAGE.replace("MONO", MONO).replace("SANS", SANS),
            *_page_colours(LIGHT),
            f"@media (prefers-color-scheme:dark){{{dark}}}",
            picture_style(),
        ]
    )


def _page_colours(scheme: Scheme) -> list[str]:
    rules = [
        f"body{{background:{scheme.page};color:{scheme.text}}}",
        f"section,.tiles div{{background:{scheme.card};border-color:{scheme.line}}}",
        f"p,caption,dt,th,.sub,footer{{color:{scheme.muted}}}",
        f"th,td{{border-color:{scheme.line}}}",
        f".over{{color:{scheme.warning}}}",
        f".scroll:focus-visible,summary:focus-visible{{outline:2px solid {scheme.stages[0]}}}",
    ]
    for i, colour in enumerate(scheme.stages):
        rules.append(f".c{i}{{background:{colour};color:{scheme.on_stage}}}")
    return rules


_PAGE = """
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;font:15px/1.5 SANS}
main{max-width:1280px;margin:0 auto;padding:24px}
h1{font-size:24px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 4px}
p{margin:0 0 12px;max-width:100ch;overflow-wrap:anywhere}
section{border:1px solid;border-radius:10px;padding:16px;margin:16px 0 0;min-width:0}
.pair{display:flex;flex-wrap:wrap;gap:0 16px}
.pair>section{flex:1 1 340px}
.pair>section:last-child{flex:2 1 540px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));gap:10px;
margin:16px 0 0}
.tiles div{border:1px solid;border-radius:10px;padding:10px 12px}
dt{font-size:12px}
dd{margin:0;font-size:17px;font-weight:650;overflow-wrap:anywhere}
dd small{display:block;font-size:12px;font-weight:400}
.scroll{overflow-x:auto;max-width:100%;scrollbar-width:thin}
.scroll.tall{overflow:auto;max-height:480px}
svg{display:block;max-width:none}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:6px 7px;border-bottom:1px solid;text-align:right;white-space:nowrap;
vertical-align:top}
th{font-weight:600;font-size:12px}
tfoot td,tfoot th{font-weight:650;border-bottom:0}
th.name,td.name{text-align:left}
td.name{font-family:MONO;font-size:12px;white-space:normal;overflow-wrap:anywhere;min-width:24ch}
.chip{display:inline-block;border-radius:6px;padding:0 8px;font-weight:650;
min-width:28px;text-align:center}
.over{font-weight:650}
summary{cursor:pointer;font-weight:650;font-size:17px}
details[open] summary{margin-bottom:8px}
footer{font-size:12px;margin:16px 0 0;overflow-wrap:anywhere}
@media (max-width:600px){main{padding:12px}section{padding:12px}h1{font-size:20px}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr));gap:8px}}
@media print{section{break-inside:avoid}}
"""
