"""The pages of `launch.show_sample`, read back."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Fails on tags that do not nest; gathers the text of every element by its class, and the tooltips."""

    def __init__(self, html):
        super().__init__()
        self.open, self.texts, self.titles, self.tags, self.ids = [], {}, [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.titles += [attributes["title"]] if "title" in attributes else []
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag not in VOID:
            self.open.append((tag, (attributes.get("class") or "").split()))

    def handle_startendtag(self, tag, attrs):
        assert tag in {"image", "use", "polygon"}, f"<{tag}/> is no element of its own in HTML"

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for name in {name for _, classes in self.open for name in classes}:
            self.texts[name] = self.texts.get(name, "") + data
