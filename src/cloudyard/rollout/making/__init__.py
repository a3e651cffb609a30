"""Tasks made from packages: fetch a source distribution, find its tests, plant one fault a task.

Knows the SDK, the package index and Python's syntax tree. No line of a package is ever run on this machine:
its code runs in sandboxes of the yard, and nowhere else.
"""
