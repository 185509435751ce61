"""The console: a web page that answers what people ask of a running system (docs/console.md).

Reads only; what acts is passed in. Every page has one address, which answers a browser with the page, a
program with JSON and a listener with the same JSON again and again.
"""
