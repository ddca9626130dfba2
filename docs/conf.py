"""Settings of Sphinx, which makes a site of the Markdown files: make site."""

# ruff: noqa: INP001  a file of Sphinx

import shlex
import sys

project = "pdsim"
html_title = project
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "experiments/**.md", "kernels/*.md", "real/**.md"]
exclude_patterns = [".*", "build"]
extensions = [
    "myst_parser",
    "sphinxcontrib.mermaid",
    "docs.navigation",
    "docs.folders",
    "docs.commands",
    "docs.fields",
    "docs.accuracy_page",
]
highlight_language = "none"

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
mermaid_cmd = shlex.join([sys.executable, "-m", "mermaidx"])  # no browser, and no script from elsewhere
mermaid_params = ["--background", "white"]  # to be read on the dark theme, too
mermaid_output_format = "png"
