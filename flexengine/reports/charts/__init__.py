"""Charts of the HTML report, as inline SVG: one file per chart, what they share in svg.py and style.py."""
