"""A page of the report, taken apart."""

import html.parser
import json

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">{{config}}\u2028'


class Page(html.parser.HTMLParser):
    """Tags with their attributes, text, and the content of scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.text, self.inside = [], [], "", None
        self.feed(text)
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += data

    def handle_endtag(self, tag):
        self.inside = None
