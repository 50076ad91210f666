"""How Sphinx builds the course's pages; `python -m course site` prepares what it reads."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "Transformers, End to End"
author = "The Transformers, End to End authors"
project_copyright = "The Transformers, End to End authors, CC BY 4.0"
language = "en"
repository = os.environ.get("COURSE_REPOSITORY", "")
release = os.environ.get("COURSE_COMMIT", "")

extensions = ["myst_nb", "extension"]
# Outputs are those of the committed lessons.
nb_execution_mode = "off"
# What a cell shows as Markdown may have tables.
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath", "attrs_block", "attrs_inline", "html_image"]
myst_heading_anchors = 4
# A lesson may link to a heading by the name that GitHub gives it.
myst_links_external_new_tab = False
suppress_warnings = ["mystnb.unknown_mime_type"]
html_math_renderer = "mathml"
# A quotation to the letter keeps its marks, and so do tokens outside of code.
smartquotes = False

html_theme = "furo"
html_title = project
html_static_path = ["static"]
templates_path = ["templates"]
# Ours reads an index of sections: course/site/index.py.
html_additional_pages = {"search": "search.html"}
html_css_files = ["course.css"]
html_js_files = [("course.js", {"defer": "defer"})]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
# A day that reads the same in every language.
html_last_updated_fmt = "%Y-%m-%d"
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_theme_options = {
    "navigation_with_keys": False,
    "light_css_variables": {
        "color-brand-primary": "#00528a",
        "color-brand-content": "#00528a",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7ab8ff",
        "color-brand-content": "#7ab8ff",
    },
}
html_context = {"repository": repository, "commit": release}
