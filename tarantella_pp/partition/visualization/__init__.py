"""Pictures of a plan: a page, SVG, PNG and DOT; nothing is loaded from anywhere else."""

from __future__ import annotations

from tarantella_pp.partition.visualization.graph_drawing.dot import render_dot
from tarantella_pp.partition.visualization.html import render_html
from tarantella_pp.partition.visualization.png import save_png
from tarantella_pp.partition.visualization.step_rows import Bar, StepBars
from tarantella_pp.partition.visualization.svg import render_svg

__all__ = ["Bar", "StepBars", "render_dot", "render_html", "render_svg", "save_png"]
