"""The version of the installed package, for people and for log lines."""

from importlib import metadata


def package_version() -> str:
    """As installed; `0+uninstalled` for a checkout that is only on the path."""
    try:
        return metadata.version("accel-yolo")
    except metadata.PackageNotFoundError:
        return "0+uninstalled"
