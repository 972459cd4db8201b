"""The version is known installed or not."""

from importlib import metadata

from accel_yolo.version import package_version


def test_the_version_is_that_of_the_installed_package():
    assert package_version() == metadata.version("accel-yolo")


def test_a_checkout_that_is_not_installed_has_one_too(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert package_version() == "0+uninstalled"
