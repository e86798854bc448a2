"""The live page, one self-contained HTML file, and the endpoints that it reads.

To show another section of `MonitorState`, add a function to `page.js`, with an entry in its table
`SECTIONS`, and a card to `page.html`.
"""
