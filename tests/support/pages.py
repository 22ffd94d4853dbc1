"""Parses HTML pages."""

import html.parser


class Tags(html.parser.HTMLParser):
    """A parser that collects the tags of a page, the values of their attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.values, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.values += [value for _, value in attrs if value]

    def handle_data(self, data):
        self.text += data
