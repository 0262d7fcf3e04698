"""The versions of halfstep and of installed packages."""

__version__ = "0.2.0"


def find_package_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
