"""Sphinx's settings: `python -m sphinx -W -b dirhtml docs build/docs`."""

import hydraloop

project = "hydraloop"
author = "the hydraloop developers"
version = release = hydraloop.__version__

extensions = ["myst_parser"]
myst_heading_anchors = 4  # links to headings, as in page.md#heading, are checked
html_theme = "furo"
html_title = "hydraloop"
html_static_path = ["_static"]
html_css_files = ["docs.css"]
html_show_copyright = False
html_copy_source = False
