"""Where stiefel_geo meets other libraries: one file per ecosystem.

The folder lies at the top of the repository and is imported as `stiefel_geo.integrations`.
"""

if __name__ != "stiefel_geo.integrations":
    raise ImportError(f"rule: import this package as stiefel_geo.integrations, not as {__name__!r}")
