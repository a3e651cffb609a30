"""Cloudyard: a yard of sandboxes in which agents are trained and evaluated. Public names load on first use."""

__version__ = "0.1.0"
