"""What the pages take beside Sphinx's own: formulas without a script, terms with their meaning."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

from course.site import languages, links, terms

NOT_IN = (
    nodes.title,
    nodes.literal,
    nodes.literal_block,
    nodes.reference,
    nodes.raw,
    nodes.math,
    nodes.term,
)


# What the converter sets without a space: a function beside its argument, and a sign it takes for a name.
FUNCTION = re.compile(r"(?<=</mi>)(?=<mi>(?:ln|log|exp|sin|cos)</mi>)")
# Within <msub> the next element is the base of a logarithm, and a third one would undo it.
ARGUMENT = re.compile(
    r"(?<!<msub>)(<mi>(?:ln|log|exp|sin|cos)</mi>)(?=<m(?:i|n|sub|sup|frac)>)"
)
THIN = '<mspace width="0.167em"/>'


def mathml(node: nodes.Node, display: str) -> str:
    """A formula as MathML, which needs no script."""
    text = node.astext().replace("×", r"\times ").replace("·", r"\cdot ")
    formula = convert(text, display=display).replace("<mi>≈</mi>", "<mo>≈</mo>")
    formula = ARGUMENT.sub(rf"\1{THIN}", formula)
    return FUNCTION.sub(THIN, formula)


def draw_inline(self, node: nodes.Node) -> None:
    """A formula within a line."""
    self.body.append(mathml(node, "inline"))
    raise nodes.SkipNode


def draw_block(self, node: nodes.Node) -> None:
    """A formula that stands by itself."""
    self.body.append(f'<div class="math">{mathml(node, "block")}</div>\n')
    raise nodes.SkipNode


def is_prose(node: nodes.Text) -> bool:
    """Whether a text is prose, and not a heading, a link, code or what a cell printed."""
    parent = node.parent
    while parent is not None:
        if isinstance(parent, NOT_IN) or is_cell(parent):
            return False
        parent = parent.parent
    return True


def join_lines(doctree: nodes.document) -> None:
    """Make one text of those that only the end of a line parts, so that a term may run over it."""
    for parent in list(doctree.findall(nodes.TextElement)):
        joined: list[nodes.Node] = []
        for part in parent.children:
            before = joined[-1] if joined else None
            if isinstance(part, nodes.Text) and isinstance(before, nodes.Text):
                joined[-1] = nodes.Text(before + part)
            else:
                joined.append(part)
        parent[:] = joined


def places_of(doctree: nodes.document) -> list[tuple[nodes.Text, bool]]:
    """The texts of a page in which a term may be shown, each with whether it is folded.

    A lesson's header lists and explains nothing.
    """
    places = []
    begun = next(doctree.findall(is_cell), None) is None
    folds = 0
    for node in doctree.findall():
        begun = begun or is_cell(node)
        if isinstance(node, nodes.raw):
            text = node.astext()
            folds += text.count("<details") - text.count("</details")
        if begun and isinstance(node, nodes.Text) and is_prose(node):
            places.append((node, folds > 0))
    return places


def is_cell(node: nodes.Node) -> bool:
    """Whether a part of a page is a cell of code."""
    return isinstance(node, nodes.container) and "cell" in node["classes"]


def mark(node: nodes.Text, match, term: terms.Term, address: str) -> None:
    """Put a link with the meaning in the place of a word."""
    text = node.astext()
    link = nodes.reference("", match[0], refuri=address, internal=True)
    link["classes"] = ["term"]
    link["reftitle"] = term.meaning.replace("`", "")
    parts = [
        nodes.Text(text[: match.start()]),
        link,
        nodes.Text(text[match.end() :]),
    ]
    node.parent.replace(node, [part for part in parts if part.astext()])


def show_terms(app: Sphinx, doctree: nodes.document, name: str) -> None:
    """Show the meaning of each term where a page first uses it."""
    folder, _, page = name.rpartition("/")
    is_glossary = page == "glossary"
    if folder == "notebooks" or name == "docs/glossary":
        glossary = terms.glossary()
        objects = app.env.domains["std"].get_objects()
        known = {
            key: (there, anchor)
            for key, _, kind, there, anchor, _ in objects
            if kind == "term"
        }
    elif folder in languages.NAMES and (is_glossary or page in languages.lessons()):
        glossary = languages.glossary(folder)
        names = [term.names[0] for term in glossary]
        there = f"{folder}/glossary"
        known = {one: (there, languages.term_anchor(one, folder)) for one in names}
    else:
        return
    join_lines(doctree)
    other = terms.other_sense(name)
    for term in glossary:
        if term.names[0] in other:
            continue
        places = places_of(doctree)
        if is_glossary:
            own = ("", *term.names)
            places = [one for one in places if entry_of(one[0]) not in own]
        said = []
        for node, folded in places:
            bold = isinstance(node.parent, nodes.strong)
            said.append(terms.Said(node.astext(), bold, folded))
        found = terms.first_use(term, said, glossary, page)
        if found and term.names[0] in known:
            place, match = found
            there, anchor = known[term.names[0]]
            address = app.builder.get_relative_uri(name, there) + "#" + anchor
            mark(places[place][0], match, term, address)


def entry_of(node: nodes.Node) -> str:
    """The name of the entry whose meaning a text belongs to; nothing outside, and at an entry's head.

    The English glossary is a list of definitions, a translated one a list with the names in bold.
    """
    while node is not None and not isinstance(node, nodes.strong):
        if isinstance(node, nodes.definition_list_item):
            return node[0].astext()
        if isinstance(node, nodes.list_item):
            head = next(node.findall(nodes.strong))
            return head.astext().partition(",")[0]
        node = node.parent
    return ""


def name_page(
    app: Sphinx, name: str, template: str, context: dict, doctree
) -> None:
    """Say in which language a page is, for reading aloud, in which others, and where it is mended."""
    language, _, page = name.rpartition("/")
    if language in languages.NAMES:
        context["language"] = language
    context["other_languages"] = others_of(app, name, page)
    context["written_in"] = links.written_in(name) if doctree else ""


def others_of(app: Sphinx, name: str, page: str) -> list[tuple[str, str, str]]:
    """The same page in other languages: the name of the language, its mark, and the address."""
    english = languages.SOURCES.get(page, "").rpartition(".")[0]
    if not english:
        return []
    names = {"en": "English"} | languages.NAMES
    places = {"en": english}
    for language, translated, _ in languages.translated():
        if translated == page:
            places[language] = f"{language}/{page}"
    if name not in places.values():
        return []
    found = []
    for language, place in places.items():
        if place != name:
            address = app.builder.get_relative_uri(name, place)
            found.append((names[language], language, address))
    return found


def leave_search_out(app: Sphinx) -> None:
    """Sphinx's own index is not written, since ours finds sections and Sphinx's finds pages."""
    app.builder.search = False


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx when it begins."""
    app.add_html_math_renderer("mathml", (draw_inline, None), (draw_block, None))
    app.connect("html-page-context", name_page)
    app.connect("builder-inited", leave_search_out)
    app.connect("doctree-resolved", show_terms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
