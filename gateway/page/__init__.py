"""The live page, one self-contained HTML file, and the feed of monitor state behind it.

To show one more section of `MonitorState`: a function in `page.js` and its place in `page.html`.
"""
