"""Sphinx's settings: `python -m sphinx -W -b dirhtml docs build/docs`."""

import hydraloop

project = "hydraloop"
author = "the hydraloop developers"
version = release = hydraloop.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "code"  # docstrings write code in single backticks, as Markdown does
autodoc_typehints = "none"  # the signature's types would be written in full, with their modules
myst_heading_anchors = 4  # links to headings, as in page.md#heading, are checked
html_theme = "furo"
html_title = "hydraloop"
html_static_path = ["_static"]
html_css_files = ["docs.css"]
html_show_copyright = False
html_copy_source = False
