"""Attempts to escape, as a table: what root inside tries, what refuses it, and what happens without that.

`kit` says what an attempt is and carries it out; the other modules are the table, by what is attacked.
`tests/live/test_escapes.py` runs every attempt twice: with all defences, and without exactly one.
"""
