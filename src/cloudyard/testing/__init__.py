"""For tests, and shipped with the package: real servers, contract suites that every implementation runs, and
fakes that pass them.
"""
