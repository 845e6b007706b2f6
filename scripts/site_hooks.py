"""Changes to the pages of the site, called by mkdocs (`hooks` in mkdocs.yml)."""

import re


def on_page_content(html: str, **_: object) -> str:
    r"""Show `\|` in the code of a table's cells as `|`, as GitHub does."""
    return re.sub(r"<td.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)
